"""Rollouts over HTTP against the same run without the service, in pairs; the size of a row; the relay per call.

Run by hand: `python -m tests.benchmarks.bench_service [ROLLOUTS [PAIRS]]`. Both have the same endpoint, agent and
containers. The time of a run is from its first start to its last end of an episode. The time of the service is what
its trainer sees: from the submission to the last line.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.run_dir import dump_json
from ares_exp.training.sequences import TrainingSequence
from ares_exp.training.service.bodies import row_of
from tests.loopback_endpoint import LoopbackEndpoint, slow
from tests.service_contract import calling, served
from tests.soak.service_kills import GREET, SUBMIT
from tests.token_engine import TokenEngine
from tests.unit.training.counted_tasks import options

LATENCY_SEC = 1.0
COMMON = ("env=harbor", "env.tasks=[write-greeting]", "agent=shell", "container=local", "tracker=none")


def without(folder: Path, url: str, rollouts: int) -> float:
    policy = ["policy=vllm", f"policy.base_url={url}", "policy.model=m", "policy.max_concurrency=1024"]
    size = [f"attempts={rollouts}", f"concurrency={rollouts}", f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, "-m", "ares_exp", *COMMON, *policy, *size], check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert all(row["reward"] == 1.0 for row in rows)
    return float(max(row["finished_at"] for row in rows) - min(row["started_at"] for row in rows))


async def over_http(folder: Path, url: str, rollouts: int) -> float:
    """Seconds that the trainer of the service sees."""
    words = [*COMMON, f"concurrency={rollouts}", f"hydra.run.dir={folder}", "serve.port=0"]
    whole = [sys.executable, "-m", "ares_exp", "serve", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(whole, text=True, **pipes) as server:  # noqa: ASYNC220 - nothing else runs meanwhile
        try:
            found = re.search(r"http://\S+\d", server.stdout.readline())
            async with calling(found[0]) as service:
                started = time.perf_counter()
                made = await service.submit(url, tasks=[{"name": "write-greeting"}], n=rollouts, want="rows")
                episodes: list[float] = []
                after, is_complete = 0, False
                while not is_complete:
                    for line in await service.lines(made["submission_id"], after=after):
                        is_complete = "complete" in line
                        if not is_complete:
                            episodes.append(line["reward"])
                            after = line["cursor"]
                seconds = time.perf_counter() - started
            assert episodes == [1.0] * rollouts
            return seconds
        finally:
            server.terminate()
            server.communicate(timeout=120)


def sizes(tokens: int = 100_000) -> dict[str, int]:
    """Bytes of a row with so many tokens, as JSON and packed."""
    numbers = range(tokens)
    row = TrainingSequence(
        ids=tuple(100_000 + number % 50_000 for number in numbers),
        mask=tuple(number % 2 for number in numbers),
        logprobs=tuple(-0.123456789 * (number % 97) for number in numbers),
        reward=1.0,
        rewards={},
        conversation="main",
        task="t",
        attempt=0,
        episode_id="e",
        policy_versions=("1",),
        steps=(0,),
        starts=(1,),
    )
    return {encoding: len(dump_json(row_of(row, encoding))) for encoding in ("json", "packed")}


async def relay_overhead(folder: Path, calls: int = 300) -> list[float]:
    """Milliseconds of calls that a trainer answers at once over the relay, with prompts of 8,000 tokens."""
    os.chdir(folder)
    options(folder / "options")
    spent = []
    async with served([]) as caller:
        relay = caller.service.policy.relay

        async def sample() -> None:
            while True:
                for one in (await caller.get("requests?wait=20"))["requests"]:
                    body = {"request_id": one["request_id"], "ids": [1] * 200, "logprobs": [-0.5] * 200, "stop": "stop"}
                    await caller.post("responses", body)

        sampling = asyncio.create_task(sample())
        for _ in range(calls):
            started = time.perf_counter()
            await relay.sampled("r", list(range(8000)), {"max_tokens": 200}, EpisodeSpec(""))
            spent.append((time.perf_counter() - started) * 1000)
        sampling.cancel()
        await asyncio.wait({sampling})
    return spent


def main(rollouts: int, pairs: int) -> None:
    """Prints a line per pair, and the median ratio."""
    for encoding, size in sizes().items():
        print(f"row of 100,000 tokens, {encoding}: {size / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as folder:
        spent = asyncio.run(relay_overhead(Path(folder)))
        os.chdir("/")
    p90 = sorted(spent)[len(spent) * 9 // 10]
    print(f"a call over the relay, 8,000 tokens: {statistics.median(spent):.1f} ms (p90 {p90:.1f}, n={len(spent)})")
    ratios = []
    with LoopbackEndpoint(otherwise=slow(LATENCY_SEC, TokenEngine([GREET, SUBMIT]))) as endpoint:
        for pair in range(pairs):
            with tempfile.TemporaryDirectory() as folder:
                order = [0, 1] if pair % 2 else [1, 0]
                seconds = [0.0, 0.0]
                for which in order:
                    place = Path(folder) / str(which)
                    if which:
                        seconds[1] = asyncio.run(over_http(place, endpoint.url, rollouts))
                    else:
                        seconds[0] = without(place, endpoint.url, rollouts)
            ratios.append(seconds[0] / seconds[1])
            print(
                f"{rollouts} rollouts: {seconds[0]:.2f} s without the service, {seconds[1]:.2f} s over HTTP: "
                f"{ratios[-1]:.2f} of the throughput",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.2f} of the throughput")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["256"])[0]), int((sys.argv[2:] or ["5"])[0]))
