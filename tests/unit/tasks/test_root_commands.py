import asyncio
import subprocess
from typing import Any, cast

import pytest

from ares_exp.containers.container import Container, ExecResult
from ares_exp.errors import ContainerError, VerifierError
from ares_exp.tasks.verification.root_commands import empty, reserve_log_dir, stop_processes


class ThisMachine:
    """Runs commands outside of any container, without the right to kill."""

    def __init__(self) -> None:
        self.output = ""

    async def exec(self, command: str, **_: Any) -> ExecResult:
        safe = f"kill() {{ echo killed $2; false; }}\n{command}"
        result = await asyncio.to_thread(
            subprocess.run, ["sh", "-c", safe], capture_output=True, text=True, check=False, timeout=60
        )
        self.output = result.stdout
        return ExecResult(result.stdout, result.returncode, 0.0)


async def test_stop_processes_spares_this_machine() -> None:
    machine = ThisMachine()
    with pytest.raises(VerifierError, match="it shares them with this machine"):
        await stop_processes(cast("Container", machine))
    assert "killed" not in machine.output


@pytest.mark.parametrize("shell", ["sh: 9: Cannot fork", "sh: can't fork: Resource", "bash: fork: retry: Resource"])
async def test_fork_bomb_is_reported_without_our_script(shell: str) -> None:
    class Full:
        async def exec(self, command: str, **_: Any) -> ExecResult:
            return ExecResult(shell, 2, 0.0)

    for work in (
        reserve_log_dir(cast("Container", Full()), "/logs/verifier", None),
        empty(cast("Container", Full()), "/x"),
    ):
        with pytest.raises(
            ContainerError, match=r"^Could not (reserve|empty) .*fork bomb.*container\.pids_limit"
        ) as caught:
            await work
        assert "\n" not in str(caught.value)
