"""A rollout service and its trainer, which are killed at random moments, and go on until all rollouts are done.

`python -m tests.soak.service_kills [KILLS] [SEED] [OVERRIDE …]` prints a line per kill. It checks that each rollout was
delivered with one cursor and one attempt, that its rows are complete, that no response was asked again but those in
progress, and that no process of a container is left 5 s after a kill of the server.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.e2e.conftest import SUBMIT
from tests.loopback_endpoint import LoopbackEndpoint, slow
from tests.token_engine import TokenEngine

GREET = "I write it.\n\n```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
CONCURRENCY, GROUP = 4, 6
RELEASED_SEC = 5.0
PATIENCE_SEC = 240.0
ROOT = Path(__file__).parents[2]


class Killed:
    def __init__(self, folder: Path, endpoint: LoopbackEndpoint, overrides: Sequence[str]) -> None:
        self._folder, self._endpoint, self._overrides = folder, endpoint, overrides
        self.run, self.ledger, self.wanted = folder / "run", folder / "ledger.jsonl", folder / "wanted"
        self._port = _free_port()
        self._log = (folder / "said.txt").open("ab")
        self.server = self._serve()
        self.trainer = self._train()

    def _serve(self) -> subprocess.Popen[bytes]:
        new = ["env=harbor", "env.tasks=[write-greeting]", "agent=shell", f"concurrency={CONCURRENCY}", "tracker=none"]
        words = [*new, f"hydra.run.dir={self.run}", *self._overrides]
        if (self.run / "config.yaml").exists():
            words = [f"resume={self.run}"]
        return self._start("ares_exp", "serve", *words, f"serve.port={self._port}")

    def _train(self) -> subprocess.Popen[bytes]:
        url = f"http://127.0.0.1:{self._port}"
        return self._start(
            "tests.soak.service_kills", "train", url, str(self.ledger), str(self.wanted), self._endpoint.url
        )

    def _start(self, module: str, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )

    def kill_server(self) -> int:
        children = _children(self.server)
        self.server.kill()
        self.server.wait()
        _, alive = psutil.wait_procs(children, timeout=RELEASED_SEC)
        left = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"{left} are left"
        self.server = self._serve()
        return len(children)

    def kill_trainer(self) -> int:
        self.trainer.kill()
        self.trainer.wait()
        self.trainer = self._train()
        return 0

    def end(self) -> None:
        self.wanted.touch()
        assert self.trainer.wait(PATIENCE_SEC) == 0, self.said
        self.server.send_signal(signal.SIGINT)
        code = self.server.wait(PATIENCE_SEC)
        assert code == 130, f"exit code {code}: {self.said}"

    def close(self) -> None:
        for one in (self.server, self.trainer):
            if one.poll() is None:
                one.kill()
                one.wait()
        self._log.close()

    @property
    def said(self) -> str:
        return (self._folder / "said.txt").read_text(errors="replace")[-5000:]

    def check(self, kills: int) -> int:
        """Checks the ledger of the trainer and the records of the run. Returns the number of rollouts."""
        lines = _lines(self.ledger)
        rollouts = {one["rollout_id"] for one in lines}
        groups = {name.rpartition("-")[0] for name in rollouts}
        assert rollouts == {f"{group}-{number}" for group in groups for number in range(GROUP)}, "a rollout is lost"
        assert len({(one["rollout_id"], one["cursor"], one["attempt"]) for one in lines}) == len(rollouts), "repeated"
        assert all((one["state"], one["reward"]) == ("finished", 1.0) for one in lines), self.said
        assert all(sum(row["mask"]) > 0 for one in lines for row in one["rows"])
        assert all(len(row["steps"]) == 2 for one in lines for row in one["rows"]), "a response is lost"
        rows = {row["attempt"]: row["outcome"] for row in _lines(self.run / "episodes.jsonl")}
        assert {rows[one["attempt"]] for one in lines} == {"completed"}
        assert len(rows) == len(rollouts), "an attempt belongs to no rollout"
        asked = len(self._endpoint.requests)
        assert 2 * len(rollouts) <= asked <= 2 * len(rollouts) + kills * CONCURRENCY, f"{asked} calls"
        left = [path.name for path in (self.run / "service").iterdir() if path.name != "record.jsonl"]
        assert not left, f"{left} were acknowledged"
        return len(rollouts)


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def train(url: str, ledger: Path, wanted: Path, endpoint: str) -> None:
    """Submits one group after the other, until the file `wanted` exists. Repeats every request that fails."""
    last = ledger.with_name("group")
    number, is_complete = int(last.read_text()) if last.exists() else 0, False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        while not (is_complete and wanted.exists()):
            is_complete = False
            last.with_suffix(".tmp").write_text(str(number))
            last.with_suffix(".tmp").replace(last)
            ids = [f"{number}-{one}" for one in range(GROUP)]
            body = {
                "tasks": [{"name": "write-greeting"}],
                "n": GROUP,
                "group_id": str(number),
                "rollout_ids": ids,
                "policy": {"base_url": endpoint, "model": "m"},
            }
            try:
                async with session.post(f"{url}/v1/rollouts", json=body) as response:
                    assert response.status == 202, await response.text()
                    submission = (await response.json())["submission_id"]
                is_complete = await _took(session, url, submission, ledger)
                number += is_complete
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.1)


async def _took(session: aiohttp.ClientSession, url: str, submission: str, ledger: Path) -> bool:
    """Takes and acknowledges episodes. Returns whether the submission is complete."""
    async with session.get(f"{url}/v1/episodes?submission={submission}&wait=20") as response:
        assert response.status == 200, await response.text()
        async for text in response.content:
            line = json.loads(text)
            if "complete" in line:
                return True
            with ledger.open("a") as file:
                file.write(text.decode())
            body = {"submission_id": submission, "cursor": line["cursor"]}
            async with session.post(f"{url}/v1/ack", json=body) as acknowledged:
                assert acknowledged.status == 200, await acknowledged.text()
    return False


def main(kills: int, seed: int, overrides: Sequence[str] = ()) -> None:
    rng, started = random.Random(seed), time.monotonic()
    engine = TokenEngine([GREET, SUBMIT])
    with (
        tempfile.TemporaryDirectory() as folder,
        LoopbackEndpoint(otherwise=slow(0.05, engine)) as endpoint,
    ):
        soak = Killed(Path(folder), endpoint, overrides)
        try:
            assert endpoint.arrived.wait(PATIENCE_SEC), soak.said
            servers = 0
            for number in range(kills):
                before = len(endpoint.requests)
                pause = rng.uniform(0, 1.5)
                time.sleep(pause)
                is_server = rng.random() < 0.6
                children = soak.kill_server() if is_server else soak.kill_trainer()
                servers += is_server
                if is_server:  # so that each server does some work
                    deadline = time.monotonic() + PATIENCE_SEC
                    while len(endpoint.requests) < before + 2:
                        assert time.monotonic() < deadline, soak.said
                        assert soak.server.poll() is None, soak.said
                        time.sleep(0.02)
                what = f"server, {children} processes" if is_server else "trainer"
                print(f"{number:3} after {pause:.2f} s: {what}; {len(endpoint.requests)} calls", flush=True)
            soak.end()
            rollouts = soak.check(servers)
        finally:
            soak.close()
    print(
        f"{kills} kills ({servers} of the server), {rollouts} rollouts, {time.monotonic() - started:.0f} s, seed {seed}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        asyncio.run(train(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]))
    else:
        main(int((sys.argv[1:] or ["200"])[0]), int((sys.argv[2:] or ["0"])[0]), sys.argv[3:])
