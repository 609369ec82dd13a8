"""`agent=opencode`: opencode, unmodified."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import EndpointOptions, InstalledAgentFactory
from ares_exp.agents.installed.packaged import LibcChoice, PackagedRecipe
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.door import DOOR_PORT
from ares_exp.interception.line import KEEPALIVE_SEC

_SWITCHED_OFF = (
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    "OPENCODE_DISABLE_SHARE",
)
_OF_THE_PROVIDER = ("webfetch", "websearch")


class OpencodeRecipe(PackagedRecipe):
    """How `opencode run` is started."""

    package_name = "opencode"
    lane_headers = ("x-session-id",)
    variables = ("provider.ares.options.baseURL in OPENCODE_CONFIG_CONTENT",)
    subagents = True

    def program(self, placed: Placed) -> str:
        """Returns its only file."""
        return placed.path("bin", "opencode")

    def check(self, placed: Placed) -> str:
        """Returns the command with a home of its own: it makes directories even then."""
        home = " ".join(f"{name}={_HOME_OF_CHECK}" for name in ("HOME", *_XDG))
        return f"{home} {self.program(placed)} --version; code=$?; rm -rf {_HOME_OF_CHECK}; exit $code"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command: the instruction comes by stdin."""
        arguments = ["run", "--format=json", "--dangerously-skip-permissions", *self.extra_args]
        home = f"{launch.directory}/opencode"
        env = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(self._config(launch)),
            "OPENCODE_FAKE_VCS": "git",
            **dict.fromkeys(_SWITCHED_OFF, "1"),
            **{name: f"{home}/{name.split('_')[1].lower()}" for name in _XDG},
            **self.env,
        }
        return LaunchedCommand(f"{launch.program} {shlex.join(arguments)}", env=env)

    def _config(self, launch: Launch) -> dict[str, object]:
        refused = (*_OF_THE_PROVIDER, *(() if self.subagents else ("task",)))
        limit = {"context": 1_000_000, "output": 32_000}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # comes with it
            "name": "ares",
            "options": {"baseURL": f"{launch.url}/v1", "apiKey": "{env:ARES_LLM_KEY}", "timeout": False},
            "models": {launch.model: {"name": launch.model, "limit": limit}},
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "model": f"ares/{launch.model}",
            "small_model": f"ares/{launch.model}",
            "agent": {"title": {"disable": True}},
            "tools": dict.fromkeys(refused, False),
            "provider": {"ares": provider},
        }


_HOME_OF_CHECK = "/tmp/ares_exp-opencode"
_XDG = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")


class OpencodeFactory(InstalledAgentFactory):
    """Makes agents that are opencode."""

    @validate_call
    def __init__(
        self,
        *,
        model_name: str = "policy",
        subagents: bool = True,
        extra_args: list[str] | None = None,
        env: dict[str, str] | None = None,
        libc: LibcChoice = "auto",
        port: Annotated[int, Field(gt=0, lt=65000)] = DOOR_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
    ) -> None:
        """Validates the options.

        Args:
            model_name: The name of the model that it is told to ask for.
            subagents: Whether it may start agents of its own; each is a lane.
            extra_args: More arguments of `opencode run`.
            env: More variables of it.
            libc: The build to be installed: `glibc`, or `auto`: what is installed already, else glibc's.
            port: The port of its LLM in the container that is tried first.
            keepalive_sec: After how many seconds, each time, it is sent something while it waits for an answer.
            forward_sampling: Whether its own sampling parameters are put into the requests that the policy gets.
        """
        recipe = OpencodeRecipe(extra_args=extra_args or (), env=env, libc=libc)
        recipe.subagents = subagents
        super().__init__(recipe, EndpointOptions(model_name, port, keepalive_sec, forward_sampling))
