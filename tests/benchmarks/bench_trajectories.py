"""What recording an episode costs: bytes on disk and CPU, beside a file that repeats the whole request at every step.

Run by hand: `python tests/benchmarks/bench_trajectories.py`. Messages of 2 KB, two more at each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response

LENGTHS = (50, 100, 250, 500)
REPEATS = 3


def episode(steps: int, *, share_messages: bool = True) -> list[StepRecord]:
    """Records of an agent that keeps one list of messages, or (not `share_messages`) builds new dicts each time."""
    messages: list[dict[str, str]] = []
    records = []
    for index in range(steps):
        reply = f"{index} ".ljust(2000, "r")
        if index:
            messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": f"{index} ".ljust(2000, "o")})
        request = LLMRequest([dict(m) for m in messages] if not share_messages else messages, system_prompt="Work.")
        response = LLMResponse.from_text(reply, usage=Usage(100 * index, 500), model="m", finish_reason="stop")
        first, last = index == 0, index == steps - 1
        records.append(
            StepRecord(
                index,
                "FIRST" if first else "LAST" if last else "MID",
                serialize_llm_request(request),
                None if first else serialize_llm_response(response),
                None if first else float(last),
                None if first else float(not last),
                1_700_000_000.0 + index,
                policy_sec=None if first else 1.0,
                environment_sec=0.1,
            )
        )
        if share_messages:
            messages = list(request.messages)
    return records


def whole_requests(records: list[StepRecord], folder: Path) -> Path:
    """One indented JSON file with every request whole."""
    path = folder / "whole.json"
    path.write_text(json.dumps([step.to_dict() for step in records], indent=2))
    return path


def ours(records: list[StepRecord], folder: Path) -> Path:
    """The JSON collector."""
    collector = JsonTrajectoryCollector(folder)
    collector.begin_episode(task_name="t", episode_id="e")
    for record in records:
        collector.record_step(record)
    collector.end_episode()
    collector.close()
    return folder / "e.json"


def measure(write: Callable[[list[StepRecord], Path], Path], records: list[StepRecord]) -> tuple[float, float]:
    """Size in MB, and the smallest CPU seconds of some repeats."""
    cpu, size = [], 0
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            path = write(records, Path(folder))
            cpu.append(time.process_time() - started)
            size = path.stat().st_size
    return size / 1e6, min(cpu)


def main() -> None:
    """Prints the table."""
    out = sys.stdout.write
    out("| steps | whole requests, one JSON | `collector=json` | bytes | CPU ")
    out("| fresh dicts each step | load |\n")
    out("|---|---|---|---|---|---|---|\n")
    for steps in LENGTHS:
        records = episode(steps)
        theirs, mine = measure(whole_requests, records), measure(ours, records)
        fresh = measure(ours, episode(steps, share_messages=False))
        with tempfile.TemporaryDirectory() as folder:
            path = ours(records, Path(folder))
            started = time.process_time()
            loaded = EpisodeTrajectory.load(path)
            load_sec = time.process_time() - started
            assert loaded.steps == tuple(records)
        out(
            f"| {steps} | {theirs[0]:.1f} MB, {theirs[1]:.3f} s | {mine[0]:.2f} MB, {mine[1]:.3f} s | "
            f"{theirs[0] / mine[0]:.0f}x | {theirs[1] / mine[1]:.0f}x | {fresh[1]:.3f} s "
            f"| {load_sec:.3f} s |\n"
        )


if __name__ == "__main__":
    main()
