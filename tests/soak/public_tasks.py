"""A folder of tasks, run by their own solutions on Docker and locally, and a table of their rewards.

`python -m tests.soak.public_tasks FOLDER [OVERRIDE …]` takes any folder of tasks in Harbor's format, such as a checkout
of a public repository. Tasks that a backend refuses are left out there, with the reason. Needs an engine, and what the
Dockerfiles ask for: their base images and the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BACKENDS = {"docker": (), "local": ("container.network=public",)}
ALWAYS = ("policy=oracle", "tracker=none", "collector=none", "concurrency=2")
MOST_REFUSED = 100


def main(folder: Path, overrides: Sequence[str]) -> int:
    """Returns 1 if a task has another reward than 1 on a backend that runs it."""
    with tempfile.TemporaryDirectory() as temporary:
        ran = {name: execute(name, folder, Path(temporary), overrides) for name in BACKENDS}
    names = sorted({task for results in ran.values() for task in results})
    width = max(map(len, names), default=4)
    print(f"\n{'task':{width}}  " + "  ".join(f"{name:>8}" for name in BACKENDS))
    for task in names:
        print(f"{task:{width}}  " + "  ".join(f"{ran[name].get(task, '-'):>8}" for name in BACKENDS))
    for name, results in ran.items():
        print(f"{name}: {sum(reward == '1' for reward in results.values())} of {len(results)} have reward 1")
    return int(any(reward != "1" for results in ran.values() for reward in results.values()))


def execute(backend: str, folder: Path, temporary: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Runs the tasks that a backend can run; returns the reward of each, or the class of its error."""
    refused: list[str] = []
    while len(refused) <= MOST_REFUSED:
        run = temporary / f"{backend}-{len(refused)}"
        words = [f"env.path={folder.resolve()}", f"container={backend}", *BACKENDS[backend], *ALWAYS, *overrides]
        words += [f"hydra.run.dir={run}", *([f"env.exclude=[{','.join(refused)}]"] if refused else [])]
        done = subprocess.run(
            [sys.executable, "-m", "ares_exp", *words], stderr=subprocess.PIPE, text=True, check=False
        )
        print(done.stderr, file=sys.stderr)
        if done.returncode != 2:
            rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
            return {row["task_name"]: _told(row) for row in rows}
        more = next((line for line in done.stderr.splitlines() if "env.exclude=[" in line), None)
        if more is None:
            raise SystemExit(done.stderr)
        refused += more.partition("env.exclude=[")[2].partition("]")[0].split(",")
    raise SystemExit(f"Over {MOST_REFUSED} tasks cannot be run with container={backend}.")


def _told(row: dict[str, object]) -> str:
    reward, error = row["reward"], row["error"]
    if isinstance(error, dict) and reward is None:
        return str(error["type"])
    return f"{reward:g}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
