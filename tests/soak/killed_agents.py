"""Runs of the real agents that are killed at moments spread over them, and resumed until they are complete.

`python -m tests.soak.killed_agents claude_code|codex COUNT [SEED] [BACKEND] [OVERRIDE …]` prints a line for each. What
must hold of each is `tests.e2e.killed_run.check`: no turn is asked twice but for the call under way, the reward, which
tells what the agent's commands have done, is that of a run that was not killed, and no process or container is left.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.counting_endpoint import CountingEndpoint, Turn
from tests.e2e.killed_run import PLAIN, KilledRun, kill_and_resume, make_tasks, moments
from tests.loopback_endpoint import completion

TURNS = 6
_STATE = re.compile(r"\d+ \d \d+ [0-9a-f]{8}")
"""A line of the file that the commands write: what else is shown differs at every playing."""


class AgentsEndpoint(CountingEndpoint):
    """Calls the tool that the agent has for commands."""

    def __init__(self) -> None:
        super().__init__(turns=(TURNS, TURNS))

    def _shown(self, message: dict[str, Any]) -> str:
        return " ".join(_STATE.findall(str(message["content"])))

    def _completion(self, turn: Turn, shown: str, body: dict[str, Any]) -> dict[str, Any]:
        command = self._command_of(turn, shown)
        if command is None:
            return completion("All done.", model=body["model"])
        names = {tool["function"]["name"] for tool in body["tools"]}
        name, arguments = "exec_command", {"cmd": command}
        if "Bash" in names:
            name, arguments = "Bash", {"command": command, "description": "works"}
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": f"call_{turn.number}", "type": "function", "function": function}]
        return completion(None, tool_calls=calls, model=body["model"])


def main(agent: str, count: int, seed: int, backend: str, overrides: Sequence[str]) -> int:
    """Returns 1 if anything failed."""
    rng, failed, began = random.Random(seed), 0, time.monotonic()
    words = [f"agent={agent}", "attempts=1", "concurrency=1", "collector=none", *overrides]
    with tempfile.TemporaryDirectory() as temporary, AgentsEndpoint() as endpoint:
        directory = Path(temporary)
        (directory / "whole").mkdir()
        make_tasks(directory / "whole", [PLAIN])
        whole = KilledRun(directory / "whole", endpoint, backend, words)
        assert whole.begin() == 0, whole.said
        assert endpoint.asked.total() == TURNS, endpoint.asked
        told: Counter[str] = Counter()
        for number, moment in enumerate(moments(count, TURNS, rng)):
            with AgentsEndpoint() as own:
                (directory / str(number)).mkdir()
                make_tasks(directory / str(number), [PLAIN])
                run = KilledRun(directory / str(number), own, backend, words)
                try:
                    says = kill_and_resume(run, whole, moment, rng)
                except (AssertionError, OSError, subprocess.TimeoutExpired):
                    failed += 1
                    says = f"FAILED: {traceback.format_exc()}\n{run.said}"
                told["calls under way that were lost"] += own.asked.total() - len(own.asked)
                told["kills"] += run.kills
            print(f"{number:3} {moment.requests} {moment.file} +{moment.seconds:.3f} s: {says}", flush=True)
    print(f"{agent}: {count} moments, {failed} failed, {dict(told)}, seed {seed}, {time.monotonic() - began:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    given = sys.argv[1:]
    start = int(given[2]) if len(given) > 2 else 0
    raise SystemExit(main(given[0], int(given[1]), start, given[3] if len(given) > 3 else "local", given[4:]))
