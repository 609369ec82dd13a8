"""Costs of the same runs in ares_exp and in Harbor: time, CPU and memory, leftovers of `kill -9`, and a resume.

Run by hand on Linux, with a Docker engine and Compose 2 (`docker compose version`):

    python -m tests.benchmarks.bench_harbor --python python3.12 [--rounds 3]

`--python` is Python 3.12 or later. pip installs Harbor into a virtual environment of it in `~/.cache/ares-exp-bench`.
Both tools run four bundled tasks on the same engine, from images that exist (no build is measured), with a public
network (without a network, Harbor needs another image). The benchmark removes its images and all leftovers.

Time: the oracle agent of each tool runs the reference solutions, in turns. "Harbor, init" adds an overlay with
`init: true`: by default, a container of Harbor takes Docker's 10 s to stop. The client is the process tree of the
command. Its memory is the largest sum of PSS. The engine is dockerd and containerd, with other users of the machine.

Kill: both tools run the same loop of ten requests, each followed by a command, at an endpoint that counts requests.
The client is killed at 60 of 80 requests. Leftovers are counted 30 s later, and again after the documented resume.
Harbor has no agent with this loop, so it gets a small one (`AGENT`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import ares_exp
from tests.loopback_endpoint import LoopbackEndpoint, respond, slow

HARBOR = "0.25.0"
OURS = [sys.executable, "-m", "ares_exp"]
TASKS = ("write-greeting", "access-log-report", "count-records", "monthly-revenue")
SIZES = {1: 1, 4: 1, 8: 2}
"""Attempts per task, by the number of episodes at once: one task, four tasks, and four tasks twice."""

Cost = tuple[float, float, float, float]
"""Time, CPU seconds of the client and of the engine, and MB of the client."""

REQUESTS, ATTEMPTS, AT_ONCE = 10, 2, 4
NEEDED = REQUESTS * ATTEMPTS * len(TASKS)
KILLED_AT = NEEDED * 3 // 4
RESPONSE_SEC, LEFT_AFTER_SEC, LIMIT_SEC = 0.5, 30.0, 600.0
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
AGENT = f"""
import asyncio, json, os, urllib.request
from harbor.agents.base import BaseAgent

def ask(messages):
    body = json.dumps({{"model": "scripted", "messages": messages}}).encode()
    with urllib.request.urlopen(os.environ["BENCH_URL"] + "/chat/completions", body, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]

class LoopAgent(BaseAgent):
    name, version = staticmethod(lambda: "loop"), lambda self: "1"
    async def setup(self, environment): pass
    async def run(self, instruction, environment, context):
        messages = [{{"role": "user", "content": instruction}}]
        while {SUBMIT!r} not in (reply := await asyncio.to_thread(ask, messages)):
            result = await environment.exec(reply.removeprefix("```bash\\n").removesuffix("\\n```"))
            messages += [{{"role": "assistant", "content": reply}}, {{"role": "user", "content": result.stdout or ""}}]
"""


class Bench:
    """Four tasks with their images, and the commands of both tools, in a temporary folder."""

    def __init__(self, folder: Path, harbor: Path) -> None:
        self.folder, self.tasks, self.harbor = folder, folder / "tasks", harbor
        self.images = {f"{task}-{tag}": f"ares-bench/{task}:{tag}" for task in TASKS for tag in [uuid.uuid4().hex[:8]]}
        for task, (name, image) in zip(TASKS, self.images.items(), strict=True):
            sample = Path(ares_exp.__file__).parent / "tasks" / "samples" / task
            docker("build", "-q", "-t", image, str(sample / "environment"))
            shutil.copytree(sample, self.tasks / name)
            settings = self.tasks / name / "task.toml"
            prebuilt = f'network_mode = "public"\ndocker_image = "{image}"'
            settings.write_text(settings.read_text().replace('network_mode = "no-network"', prebuilt))
        (folder / "init.yaml").write_text("services:\n  main:\n    init: true\n")
        (folder / "bench_agent.py").write_text(AGENT)

    def ours(self, place: Path, concurrency: int, attempts: int, *more: str) -> list[str]:
        settings = [f"env.path={self._path(concurrency)}", f"concurrency={concurrency}", f"attempts={attempts}"]
        return [*OURS, "container=docker", "tracker=none", f"hydra.run.dir={place}", *settings, *more]

    def theirs(self, place: Path, concurrency: int, attempts: int, *more: str, init: bool) -> list[str]:
        settings = ["-p", self._path(concurrency), "-n", str(concurrency), "-k", str(attempts), "--yes", "--quiet"]
        settings += ["--extra-docker-compose", str(self.folder / "init.yaml")] if init else []
        return [str(self.harbor), "run", "-o", str(place.parent), "--job-name", place.name, *settings, *more]

    def _path(self, concurrency: int) -> str:
        return str(self.tasks / next(iter(self.images)) if concurrency == 1 else self.tasks)

    def leftovers(self) -> tuple[list[str], list[str]]:
        """Returns the containers and networks of the tasks."""
        containers = docker("ps", "-aq", *(f"--filter=ancestor={image}" for image in self.images.values()))
        return containers.split(), docker("network", "ls", "-q", *(f"--filter=name={n}__" for n in self.images)).split()

    def remove_leftovers(self) -> None:
        for command, found in zip((("rm", "-f"), ("network", "rm")), self.leftovers(), strict=True):
            if found:
                docker(*command, *found)


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], stdout=subprocess.PIPE, text=True, timeout=LIMIT_SEC, check=True).stdout


def install_harbor(python: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "ares-exp-bench" / f"harbor-{HARBOR}"
    if not (place / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True, timeout=LIMIT_SEC)
        subprocess.run([place / "bin/pip", "install", "-qqq", f"harbor=={HARBOR}"], check=True, timeout=LIMIT_SEC)
        (place / "ready").touch()
    return place / "bin" / "harbor"


class Client:
    """A command in a separate session."""

    def __init__(self, command: Sequence[str], folder: Path, url: str = "") -> None:
        paths = f"{folder}{os.pathsep}{Path(ares_exp.__file__).parents[1]}"
        settings = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env = {**os.environ, **settings, "PYTHONPATH": paths, "BENCH_URL": url}
        self._log, self.memory = folder / "log", 0.0
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait(60)

    def wait(self) -> None:
        deadline = time.monotonic() + LIMIT_SEC
        while self.process.poll() is None and time.monotonic() < deadline:
            total = 0.0
            for process in self.processes():
                with contextlib.suppress(psutil.Error):  # it has ended
                    total += process.memory_full_info().pss / 1e6
            self.memory = max(self.memory, total)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        if self.process.returncode != 0:
            raise SystemExit(f"{self.process.args!r} failed: {self.output()}")

    def output(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                if os.getsid(pid) == self.process.pid and (process := psutil.Process(pid)).status() != "zombie":
                    found.append(process)
        return found


def engine_seconds() -> float:
    engines = psutil.process_iter(["name", "cpu_times"])
    times = [process.info["cpu_times"] for process in engines if process.info["name"] in ("dockerd", "containerd")]
    return sum((part.user + part.system for part in times), 0.0)


def measure(command: Sequence[str], folder: Path, url: str = "") -> Cost:
    """Runs a command to its end."""
    started, before, engine = time.perf_counter(), os.times(), engine_seconds()
    with Client(command, folder, url) as client:
        client.wait()
    wall, after = time.perf_counter() - started, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children that have ended
    return wall, cpu, engine_seconds() - engine, client.memory


def check(place: Path, episodes: int) -> None:
    """Checks that every episode passed. Both tools also exit with code 0 if a reward is 0."""
    ours = [json.loads(row) for path in place.glob("episodes.jsonl") for row in path.read_text().splitlines()]
    theirs = [json.loads(path.read_text())["verifier_result"] or {} for path in place.glob("*/result.json")]
    rewards = [row["rewards"]["reward"] for row in ours + theirs if row.get("rewards")]
    if rewards != [1.0] * episodes:
        raise SystemExit(f"Expected {episodes} episodes with reward 1, got {rewards}")


def time_table(bench: Bench, rounds: int) -> None:
    print("| episodes at once | tool | time | client CPU | engine CPU | client memory |\n|---|---|---|---|---|---|")
    for concurrency, attempts in SIZES.items():
        costs: dict[str, list[Cost]] = {"ares_exp": [], "Harbor": [], "Harbor, init": []}
        for _ in range(rounds):
            for tool, found in costs.items():
                place = bench.folder / uuid.uuid4().hex
                command = bench.theirs(place, concurrency, attempts, "-a", "oracle", init=tool != "Harbor")
                if tool == "ares_exp":
                    command = bench.ours(place, concurrency, attempts)
                found.append(measure(command, bench.folder))
                check(place, concurrency)
        for tool, found in costs.items():
            *seconds, memory = zip(*found, strict=True)
            cells = [f"{statistics.median(part):.1f} s ({min(part):.1f}-{max(part):.1f})" for part in seconds]
            cells.append(f"{statistics.median(memory):.0f} MB")
            print(f"| {concurrency} | {tool} | {' | '.join(cells)} |", flush=True)


def scripted(tasks: Path) -> Callable[[dict[str, Any]], str]:
    """Returns the model, which waits eight times, then solves the task, then submits."""
    solutions = {
        (task / "instruction.md").read_text().splitlines()[0]: (task / "solution" / "solve.sh").read_text().strip()
        for task in tasks.iterdir()
    }

    def reply(body: dict[str, Any]) -> str:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        said = "\n".join(str(message["content"]) for message in body["messages"])
        solution = next(solution for line, solution in solutions.items() if line in said)
        command = [*["sleep 0.1; echo done"] * (REQUESTS - 2), solution, SUBMIT][turn]
        return f"```bash\n{command}\n```"

    return reply


def kill_and_resume(bench: Bench, tool: str) -> list[str]:
    """Returns the cells of a tool."""
    place = bench.folder / uuid.uuid4().hex
    with LoopbackEndpoint(otherwise=slow(RESPONSE_SEC, respond(scripted(bench.tasks)))) as endpoint:
        if tool == "ares_exp":
            model = "policy=openai", f"policy.base_url={endpoint.url}", "policy.model=scripted"
            start = bench.ours(place, AT_ONCE, ATTEMPTS, *model, "policy.api_key_env=null")
            resume = [*OURS, f"resume={place}"]
        else:
            start = bench.theirs(place, AT_ONCE, ATTEMPTS, "-a", "bench_agent:LoopAgent", init=True)
            resume = [str(bench.harbor), "job", "resume", "-p", str(place)]
        with Client(start, bench.folder, endpoint.url) as client:
            deadline = time.monotonic() + LIMIT_SEC
            while len(endpoint.requests) < KILLED_AT:
                if client.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{tool} did not send {KILLED_AT} requests: {client.output()}")
                time.sleep(0.01)
            client.process.kill()
            time.sleep(LEFT_AFTER_SEC)
            left, sent = [*bench.leftovers(), client.processes()], len(endpoint.requests)
            took = measure(resume, bench.folder, endpoint.url)[0]
            still, again = [*bench.leftovers(), client.processes()], len(endpoint.requests) - sent
    check(place, ATTEMPTS * len(TASKS))
    bench.remove_leftovers()
    counts = [", ".join(str(len(found)) for found in kinds) for kinds in (left, still)]
    return [*counts, str(sent), str(again), str(sent + again - NEEDED), f"{took:.1f} s"]


def kill_table(bench: Bench) -> None:
    left = f"containers, networks, processes left after {LEFT_AFTER_SEC:.0f} s"
    counts = f"requests until then, of {NEEDED}", "requests of the resume", "repeated requests"
    rows = left, "left after the resume", *counts, "time of the resume"
    print(f"\n| `kill -9` with {AT_ONCE} running episodes | ares_exp | Harbor |\n|---|---|---|")
    for row in zip(rows, kill_and_resume(bench, "ares_exp"), kill_and_resume(bench, "Harbor"), strict=True):
        print(f"| {' | '.join(row)} |", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="interpreter for Harbor: 3.12 or later")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tool and size; 0 for only the kill")
    options = parser.parse_args(given)
    compose, harbor = docker("compose", "version").split()[-1], install_harbor(options.python)
    engine = docker("version", "--format", "{{.Server.Version}}").strip()
    print(f"Harbor {HARBOR}, Compose {compose}, Docker {engine}, Python {platform.python_version()},")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}\n")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), harbor)
        try:
            if options.rounds:
                time_table(bench, options.rounds)
            kill_table(bench)
        finally:
            bench.remove_leftovers()
            docker("rmi", "-f", *bench.images.values())


if __name__ == "__main__":
    main()
