"""What a report of a large run costs: 1,000 episodes of 250 steps of 4 kB, a gigabyte of trajectories.

`python -m tests.benchmarks.bench_report [FOLDER]`; the run is left in FOLDER if one is given. Texts are random words;
50 episodes of them are written 20 times each under names of their own. With Chromium and its driver (`tests/browser`)
also how long the page takes there, and on the live page.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_dir import RunDir
from ares_exp.trajectories.files.episode_file import dump_episode, end_line, start_line
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response
from tests.browser.chromium import Page, chromium, is_here
from tests.unit.commands.served import served

EPISODES, STEPS, STEP_BYTES, DISTINCT, ATTEMPTS = 1000, 250, 4000, 50, 4


def words(random_: random.Random, size: int) -> str:
    vocabulary = [
        "".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=random_.randrange(2, 10))) for _ in range(3000)
    ]
    return " ".join(random_.choices(vocabulary, k=size // 6))[:size]


def episode(seed: int) -> EpisodeTrajectory:
    random_, records = random.Random(seed), []
    text, messages = words(random_, STEP_BYTES * 400), []
    for index in range(STEPS):
        at = random_.randrange(len(text) - STEP_BYTES)
        reply = f"I do {index}: {text[at : at + 500]}"
        if index:
            messages = [*messages, {"role": "assistant", "content": reply}]
        messages = [*messages, {"role": "user", "content": text[at : at + STEP_BYTES - 500]}]
        last = index == STEPS - 1
        answer = LLMResponse.from_text(
            reply, usage=Usage(100 * index, 120), cost=0.001, model="m", finish_reason="stop"
        )
        records.append(
            StepRecord(
                index,
                "FIRST" if index == 0 else "LAST" if last else "MID",
                None if last else serialize_llm_request(LLMRequest(messages)),
                None if index == 0 else serialize_llm_response(answer),
                None if index == 0 else float(last and seed % 3 > 0),
                None if index == 0 else float(not last),
                1e9 + index,
                1.0,
                0.5,
                0.5,
                () if index == 0 else (CommandRecord(f"run {text[at : at + 60]}", index % 7 and 1, 0.4),),
            )
        )
        messages = list(records[-1].observation["messages"]) if records[-1].observation else messages
    return EpisodeTrajectory(
        "e", "t", tuple(records), 1e9, 1e9 + STEPS, records[-1].reward, STEPS, False, Outcome.COMPLETED
    )


def make_run(path: Path) -> None:
    run = RunDir(path)
    run.trajectories.mkdir(parents=True)
    rows = []
    for seed in range(DISTINCT):
        made = episode(seed)
        _, *middle, _ = dump_episode(made)
        for copy in range(EPISODES // DISTINCT):
            number = copy * DISTINCT + seed
            task, attempt = f"task-{number // ATTEMPTS:03}", number % ATTEMPTS
            own = replace(made, episode_id=f"{task}__{attempt}__{number:08x}", task_name=task)
            file = run.trajectories / f"{own.episode_id}.json"
            file.write_text("".join([start_line(own), *middle, end_line(own)]), encoding="utf-8")
            rows.append(row(own, attempt, number, seed))
    run.episodes.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in rows))
    run.config.write_text("attempts: 4\n")


def row(own: EpisodeTrajectory, attempt: int, number: int, seed: int) -> EpisodeResult:
    return EpisodeResult(
        own.episode_id,
        own.task_name,
        attempt,
        number,
        own.outcome,
        own.total_reward,
        num_steps=STEPS - 1,
        prompt_tokens=100 * STEPS * (seed + 10),
        generated_tokens=120 * STEPS,
        cost=0.25 + seed / 100,
        started_at=1e9 + number,
        finished_at=1e9 + number + STEPS,
        phase_sec={"policy": 250.0, "start": 1.0},
    )


def report(run: Path, out: Path) -> None:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ares_exp", "report", str(run), "-o", str(out)], check=True)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    size = out.stat().st_size / 1e6
    print(f"report: {time.perf_counter() - started:.1f} s, {memory:.0f} MB of memory, {size:.1f} MB of file")


def opened(page: Page, name: str, address: str, episode_view: str) -> None:
    started = time.perf_counter()
    page.driver.get(address)
    page.until("return document.querySelectorAll('[data-table=episodes] tbody tr').length === 200", timeout=120)
    table = time.perf_counter() - started
    started = time.perf_counter()
    page.run(f"location.hash = {episode_view}")
    page.until("return document.querySelectorAll('.step').length === 50")
    shown = time.perf_counter() - started
    heap = page.run("return performance.memory.usedJSHeapSize") / 1e6
    print(f"{name}: table usable after {table:.2f} s, an episode after {shown:.2f} s, heap {heap:.0f} MB")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run, out = Path(*(sys.argv[1:2] or [scratch])) / "large", Path(scratch) / "report.html"
        if not run.exists():
            make_run(run)
        size = sum(path.stat().st_size for path in (run / "trajectories").iterdir())
        print(f"{EPISODES:,} episodes of {STEPS} steps: {size / 1e9:.2f} GB")
        report(run, out)
        if is_here():
            with chromium(Path(scratch) / "profile") as page:
                page.size(1280)
                first = "episodeAddress(0, Object.keys(payload.runs[0].blocks)[0])"
                opened(page, "report in Chromium", out.as_uri(), first)
                with served(run) as address:
                    for name in ("view", "view again"):
                        opened(page, name, address, "episodeAddress(0, payload.runs[0].episodes[500].episode_id)")
                    page.driver.get("about:blank")


if __name__ == "__main__":
    main()
