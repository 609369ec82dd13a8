"""`agent=mini_swe_agent`: unmodified mini-swe-agent, run by the container's own Python."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    LONGEST_WAIT_MS,
    Launch,
    LaunchedCommand,
    LibcChoice,
    PackagedAgentFactory,
)
from ares_exp.agents.interception.line import KEEPALIVE_SEC
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.forwarded_port import FORWARDED_PORT

_LAUNCH = """\
import os
import sys

sys.path.insert(0, sys.argv.pop(1))
if sys.argv[1:] == ["--version"]:
    import minisweagent
    import pydantic_core
    import yaml

    print(minisweagent.__version__)
else:
    from minisweagent.run.mini import app

    with open(os.environ["ARES_INSTRUCTION_FILE"], encoding="utf-8", errors="replace") as file:
        sys.argv[1:1] = ["--task", file.read()]
    app()
"""
"""Python code that adds the packages' directory to `sys.path` and starts `mini`.

`PYTHONPATH` is not set, because it would also affect the Python programs that the agent runs.
"""


class MiniSweAgentFactory(PackagedAgentFactory):
    """Creates mini-swe-agent agents, which start `mini`."""

    name = "mini_swe_agent"
    variables = ("model.model_kwargs.api_base", "OPENAI_API_KEY")

    @validate_call
    def __init__(
        self,
        *,
        model_name: str = "policy",
        pythons: list[str] | None = None,
        extra_args: list[str] | None = None,
        env: dict[str, str] | None = None,
        libc: LibcChoice = "auto",
        port: Annotated[int, Field(gt=0, lt=65000)] = FORWARDED_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
    ) -> None:
        """Validates the options.

        Args:
            model_name: Model name that the agent sends in its requests.
            pythons: Minor versions of Python in the images, such as `3.12`. The agent is installed for each of them.
                Default: the versions for which it is already installed, otherwise the version of this process.
            extra_args: Additional arguments of `mini`, such as `-c` with a setting.
            env: Additional environment variables of `mini`.
            libc: Build to install: `glibc`, `musl` (for images without glibc), or `auto`, which uses the installed
                builds, or installs the glibc build if there are none.
            port: Port on the container's loopback for requests to the LLM. If it is in use, the next ports are tried.
            keepalive_sec: Interval in seconds between keepalives while `mini` waits for a response.
            forward_sampling: Whether the requests to the policy include the agent's own sampling parameters.
        """
        super().__init__(
            model_name=model_name,
            extra_args=extra_args,
            env=env,
            libc=libc,
            port=port,
            keepalive_sec=keepalive_sec,
            forward_sampling=forward_sampling,
        )
        self.pythons = pythons or ()

    def program(self, placed: Placed) -> str:
        """Returns the shell words that start `mini`: the container's Python, `_LAUNCH`, and the packages' directory."""
        return shlex.join([placed.python, "-I", "-c", _LAUNCH, placed.path("site")])

    def check(self, placed: Placed) -> str:
        """Returns a command that prints the version.

        Even `--version` creates a settings directory, so the command uses a temporary one.
        """
        quiet = "MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR=/tmp/ares_exp-mini"
        return f"{quiet} {self.program(placed)} --version"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode. `_LAUNCH` reads the instruction from `$ARES_INSTRUCTION_FILE`."""
        arguments = [
            *("--model", f"openai/{launch.model}", "--yolo", "--exit-immediately", "--cost-limit", "0"),
            *("--output", f"{AGENT_DIR}/mini.traj.json", "-c", "mini"),
            *(
                "-c",
                f"model.model_kwargs.api_base={launch.url}/v1",
                "-c",
                f"model.model_kwargs.timeout={LONGEST_WAIT_MS // 1000}",
            ),
            *self.extra_args,
        ]
        env = {
            "OPENAI_API_KEY": launch.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/ares_exp-mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            **self.env,
        }
        return LaunchedCommand(f"{launch.program} {shlex.join(arguments)}", env=env)
