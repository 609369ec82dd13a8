import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, run_command
from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, make_run
from tests.loopback_endpoint import LoopbackEndpoint, respond
from tests.warm_start import warm_command

SUBMIT = "Done.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```\n"
STARTS = ("test_command_line.py", "test_secrets.py", "test_oracle_solves_the_samples")
"""Files and tests about the start of a command, where every one is a new interpreter."""


@pytest.fixture
def endpoint() -> Iterator[LoopbackEndpoint]:
    """A chat-completions server whose model submits at once."""
    with LoopbackEndpoint(otherwise=respond(SUBMIT)) as server:
        yield server


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KilledRun]:
    with CountingEndpoint() as server:
        run = make_run(tmp_path_factory.mktemp("whole"), server)
        assert run.start() == 0, run.said
        yield run


@pytest.fixture
def cli(cli: Cli, request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    """Runs `python -m ares_exp …` in an empty directory: a fork, where the start says nothing."""
    if request.path.name in STARTS or request.node.name in STARTS:
        return cli

    def run(*arguments: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        return run_command((*warm_command(), *arguments), tmp_path, env, **more)

    return run
