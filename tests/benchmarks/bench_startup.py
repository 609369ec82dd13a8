"""How soon the command line answers: `--help` beside a three-line Hydra app's, `--cfg job`, and the first result.

Run by hand: `python tests/benchmarks/bench_startup.py`. Wall seconds, the two kinds of help in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
HYDRA_APP = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(cfg): pass
main()
"""


def wall(command: list[str], cwd: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=cwd, capture_output=True, check=True, timeout=60)
    return time.perf_counter() - started


def first_result(cwd: Path, number: int) -> tuple[float, float]:
    """Seconds from starting the process to the first finished episode, and to its exit."""
    started, clock = time.time(), time.perf_counter()
    command = [sys.executable, "-m", "ares_exp", f"hydra.run.dir=run{number}"]
    subprocess.run(command, cwd=cwd, capture_output=True, check=True, timeout=60)
    whole = time.perf_counter() - clock
    line = (cwd / f"run{number}" / "episodes.jsonl").read_text().splitlines()[0]
    return json.loads(line)["finished_at"] - started, whole


def show(what: str, seconds: list[float]) -> float:
    median = statistics.median(seconds)
    print(f"{what:<42}{median:>8.3f} s  ({min(seconds):.3f}-{max(seconds):.3f})")
    return median


def main() -> None:
    print(f"medians of {ROUNDS} (min-max), Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "app.py").write_text(HYDRA_APP)
        commands = {
            "--help": [sys.executable, "-m", "ares_exp", "--help"],
            "a three-line Hydra app's --help": [sys.executable, "app.py", "--help"],
            "--cfg job": [sys.executable, "-m", "ares_exp", "--cfg", "job"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(wall(command, here))
        medians = [show(name, seconds) for name, seconds in times.items()]
        print(f"ratio of the two helps: {medians[0] / medians[1]:.2f}")
        runs = [first_result(here, number) for number in range(ROUNDS)]
        show("sample run: first result", [run[0] for run in runs])
        show("sample run: whole, W&B offline", [run[1] for run in runs])


if __name__ == "__main__":
    main()
