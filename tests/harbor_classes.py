"""Agents by the interface of Harbor's `BaseAgent`. Importable only after `tests.fake_harbor.use`, or with Harbor."""

import json
import os
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities

from tests.conftest import ROOT

PROGRAM = ROOT / "tests" / "data" / "agents" / "chat_agent.py"


class NoUrlAgent(BaseAgent):  # type: ignore[misc]
    """Has no option for the URL of its LLM."""

    @staticmethod
    def name() -> str:
        return "chat"

    def version(self) -> str:
        return "1.2.3"

    async def setup(self, environment: Any) -> None:
        (self.logs_dir / "from_host.txt").write_text("shared")
        await environment.exec("cp /logs/agent/from_host.txt /logs/agent/copied.txt")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        connection = self.model_connection
        (self.logs_dir / "instruction.txt").write_text(instruction)
        await environment.upload_file(PROGRAM, "/tmp/chat_agent.py")
        result = await environment.exec(
            "env > /logs/agent/env.txt; python3 /tmp/chat_agent.py < /logs/agent/instruction.txt",
            env={
                "ARES_LLM_URL": connection.execution_base_url.removesuffix("/v1"),
                "ARES_LLM_KEY": connection.api_key,
                "ARES_MODEL": self.model_name,
                "OF_THE_HOST": os.environ.get("PROBE_API_KEY", ""),
            },
        )
        if result.return_code != 0:
            raise RuntimeError(f"exit code {result.return_code}: {result.stdout}{result.stderr}")

    def populate_context_post_run(self, context: Any) -> None:
        files = sorted(path.name for path in self.logs_dir.iterdir())
        (self.logs_dir / "trajectory.json").write_text(json.dumps({"files": files}))


class ChatAgent(NoUrlAgent):
    """Runs the program `tests/data/agents/chat_agent.py`."""

    capabilities = AgentCapabilities(base_url=True, mcp_servers=True, skills=True, atif=True)
    MODEL_CONNECTION = ModelConnectionSpec(supported_api_formats=["openai_chat_completions", "google_generate_content"])


class PickyAgent(ChatAgent):
    """Rejects all options."""

    def __init__(self, **options: Any) -> None:
        raise ValueError("Unknown option 'colour'.")


class SilentAgent(ChatAgent):
    """Ends without a request."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        raise ValueError("no program")


class BedrockAgent(ChatAgent):
    """Uses only an API that is not served."""

    MODEL_CONNECTION = ModelConnectionSpec(supported_api_formats=["bedrock_converse"])
