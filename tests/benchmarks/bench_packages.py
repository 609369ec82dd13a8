"""What a large package (`agent.package`) adds to a run: 900 MB in 20,000 files.

Run by hand: `python -m tests.benchmarks.bench_packages`. Prints the seconds of whole runs in pairs, without the package
and with it, in a local container.
"""

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ares_exp
from ares_exp.agents.toolbox.package import user_package
from ares_exp.agents.toolbox.package_store import AgentStore

FILES, SIZE, PAIRS = 20_000, 900_000_000, 7
ASK = (
    """curl -s -H "Authorization: Bearer $ARES_LLM_KEY" -H 'Content-Type: application/json' """
    """-d '{"model":"m","messages":[{"role":"user","content":"hello"}]}' $ARES_LLM_URL/v1/chat/completions"""
)


def make(folder: Path) -> dict[str, Any]:
    content = os.urandom(SIZE // FILES)
    for number in range(FILES):
        place = folder / str(number % 200)
        place.mkdir(exist_ok=True)
        (place / str(number)).write_bytes(content)
    return {"version": "1", "packages": [], "programs": []}


def seconds(folder: Path, *words: str) -> float:
    fixed = ["agent=command", "env.tasks=[write-greeting]", "tracker=none", f"hydra.run.dir={folder}"]
    start = time.perf_counter()
    results = ares_exp.run(
        [*fixed, f"agent.command={ASK!r}", "policy.replies=[x]", "policy=scripted", *words], quiet=True
    )
    assert results.exit_code == 0, results
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        AgentStore().keep(user_package("large").builds[0], make, stop=threading.Event(), timeout_sec=60)
        seconds(Path(name) / "warm")
        pairs = [
            (seconds(Path(name) / f"{n}-without"), seconds(Path(name) / f"{n}-with", "agent.package=large"))
            for n in range(PAIRS)
        ]
    without, with_it = (statistics.median(column) for column in zip(*pairs, strict=True))
    more = statistics.median(after - before for before, after in pairs)
    print(f"without {without:.2f} s, with the package {with_it:.2f} s, difference of pairs {more:+.2f} s")


if __name__ == "__main__":
    main()
