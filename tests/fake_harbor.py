"""The part of Harbor that `agent=harbor` uses, for Python 3.11. The nightly run has the same tests with Harbor."""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest


class Record:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update({"mcp_servers": False, "skills": False, "base_url": False, "atif": False, **values})


class BaseAgent:
    capabilities: ClassVar[Any] = Record()
    MODEL_CONNECTION: ClassVar[Any] = None

    def __init__(self, logs_dir: Path, extra_env: dict[str, str], base_url: str | None = None, **more: Any) -> None:
        self.logs_dir = logs_dir
        self.extra_env = extra_env
        self.mcp_servers = more.get("mcp_servers", [])
        self.skills_dir = more.get("skills_dir")
        self.model_name = more["model_name"]
        self.model_connection = Record(execution_base_url=base_url, api_key=extra_env[more["model_api_key_name"]])

    def populate_context_post_run(self, context: Any) -> None:
        pass


@dataclass
class AgentConfig:
    name: str
    model_name: str = ""
    base_url: str | None = None
    model_api_key_name: str | None = None
    model_api_format: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)


class AgentFactory:
    @classmethod
    def get_agent_class_from_config(cls, config: AgentConfig) -> Any:
        module, colon, name = config.name.partition(":")
        if not colon:
            raise ValueError(f"Agent name {module} is not valid. Valid agent names: …")
        return getattr(importlib.import_module(module), name)

    @classmethod
    def create_agent_from_config(cls, config: AgentConfig, **more: Any) -> Any:
        given = {name: getattr(config, name) for name in ("model_name", "base_url", "model_api_key_name")}
        return cls.get_agent_class_from_config(config)(extra_env=config.env, **given, **config.kwargs, **more)


NAMES: dict[str, dict[str, Any]] = {
    "harbor.agents.agent_auth_resolution": {"ModelConnectionSpec": Record},
    "harbor.agents.base": {"BaseAgent": BaseAgent},
    "harbor.agents.capabilities": {"AgentCapabilities": Record},
    "harbor.agents.factory": {"AgentFactory": AgentFactory},
    "harbor.environments.base": {"ExecResult": Record},
    "harbor.models.agent.context": {"AgentContext": Record},
    "harbor.models.task.config": {"MCPServerConfig": Record},
    "harbor.models.trial.config": {"AgentConfig": AgentConfig},
}


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these names importable, unless Harbor is installed."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # which agent=harbor sets for the process
    if importlib.util.find_spec("harbor") is not None:
        return
    for path, names in NAMES.items():
        module = ModuleType(path)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.delitem(sys.modules, "tests.harbor_classes", raising=False)
