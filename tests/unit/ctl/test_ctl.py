"""`ares-exp ctl`: a run that goes on is told and controlled; one that does not is refused."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.control.orders import look
from ares_exp.control.status import read_status
from ares_exp.control.stop_file import STOP
from ares_exp.ctl.command_line import main
from ares_exp.records.run_dir import SWEEP_RECORD
from ares_exp.running import run_control
from tests.conftest import ROOT
from tests.unit.report.recorded import row, run_of

LIMIT_SEC = 60
SLOW = """\
_target_: tests.slow_policy.SlowPolicy
delay_sec: 0.05
replies: ["```bash\\ntrue\\n```"]
repeat_last: true
"""


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SEC):
        while not is_so():  # noqa: ASYNC110 - files are looked at
            await asyncio.sleep(0.02)


class Live:
    """A run that goes on, and its command."""

    def __init__(self, path: Path, playing: asyncio.Task[Any], capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.playing, self._capsys = path, playing, capsys

    async def ctl(self, *words: str) -> tuple[int, str]:
        """Runs the command; returns exit code and output."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, [str(self.path), *words])
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


@pytest.fixture
async def live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Live]:
    monkeypatch.setattr(run_control, "LOOK_SEC", 0.05)
    monkeypatch.setattr(run_control, "TOLD_SEC", 0.1)
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "slow.yaml").write_text(SLOW)
    path = tmp_path / "run"
    words = [
        "policy=slow",
        "env.tasks=[write-greeting]",
        "attempts=3",
        "container=local",
        "tracker=none",
        "snapshot=manual",
    ]
    limits = ["limits.steps=10000", "concurrency=2", f"hydra.run.dir={path}"]
    playing = asyncio.create_task(ares_exp.arun([*words, *limits], config_dirs=[tmp_path / "conf"], quiet=True))
    try:
        async with asyncio.timeout(LIMIT_SEC):
            while not (path / "status.json").exists():
                assert not playing.done() or playing.result()
                await asyncio.sleep(0.02)
        yield Live(path, playing, capsys)
    finally:
        playing.cancel()
        await asyncio.wait({playing}, timeout=LIMIT_SEC)


@pytest.mark.local
async def test_a_run_is_told_paused_resumed_and_ended(live: Live) -> None:
    code, said = await live.ctl("status")
    assert code == 0
    assert "under way, 2 of at most 2 episodes under way, 1 queued, 0 ended" in said
    assert said.count("write-greeting__") == 2
    told = json.loads((await live.ctl("status", "--json"))[1])
    assert (told["state"], told["status"]["state"], told["status"]["concurrency"]) == ("under way", "under way", 2)
    code, said = await live.ctl("pause", "--now", "--reason", "a \x1b[2J reason")
    assert (code, "2 episodes under way held at the next request" in said) == (0, True)
    said = (await live.ctl("status"))[1]
    assert "paused: the policy is not asked (by " in said
    assert "\x1b" not in said
    assert "Resumed after" in (await live.ctl("resume"))[1]
    told = json.loads((await live.ctl("stop", "--json"))[1])
    assert [one["outcome"] for one in told["answers"]] == ["done"]
    async with asyncio.timeout(LIMIT_SEC):
        results = await live.playing
    assert results.exit_code == 130
    noted = [json.loads(line) for line in (live.path / "control.jsonl").read_text().splitlines()]
    assert [(line["verb"], line["outcome"]) for line in noted] == [(v, "done") for v in ("pause", "resume", "stop")]
    assert noted[0]["uid"] == os.getuid()
    assert (await live.ctl("status"))[1] == f"{live.path}: interrupted\n"
    code, said = await live.ctl("pause")
    assert (code, "Expected a run that is under way" in said) == (2, True)
    assert list((live.path / "control").glob("*.json")) == []


@pytest.mark.local
async def test_settings_episodes_snapshots_and_branches(live: Live) -> None:
    code, said = await live.ctl("set", "concurrency=3", "budget.cost=2.5", "--reason", "more")
    assert (code, "In force: concurrency=3, budget.cost=2.5." in said) == (0, True)
    assert "budget.cost=2.5: 0 spent" in (await live.ctl("status"))[1]
    assert (await live.ctl("set", "seed=3"))[0] == 1
    told = json.loads((await live.ctl("status", "--json"))[1])["status"]
    first, second = (one["episode_id"] for one in told["episodes"][:2])
    code, said = await live.ctl("branch", first, "--n", "2")
    assert code == 0
    [branch] = re.findall(rf"branch_from={live.path}/({first}@\d+) branches=2", said)
    assert (live.path / "snapshots" / branch / "snapshot.json").exists()
    assert "1 episode ended and scored" in (await live.ctl("cancel", first, "--verify"))[1]
    assert "1 episode cancelled" in (await live.ctl("cancel", second))[1]

    def rows() -> dict[str, dict[str, Any]]:
        lines = (live.path / "episodes.jsonl").read_text().splitlines()
        return {row["episode_id"]: row for row in map(json.loads, lines)}

    await until(lambda: {first, second} <= set(rows()))
    assert (rows()[first]["outcome"], rows()[first]["reward"]) == ("truncated", 0.0)
    assert rows()[second]["outcome"] == "cancelled"
    code, said = await live.ctl("retry", second)
    assert "1 attempt next in the queue, 1 with recorded answers" in said

    def retries() -> list[int]:
        status = read_status(live.path / "status.json")
        return [one.retry for one in status.episodes] if status is not None else []

    await until(lambda: 1 in retries())


@pytest.mark.local
async def test_a_branch_is_played_at_once_and_ctrl_c_is_its_own(live: Live) -> None:
    told = json.loads((await live.ctl("status", "--json"))[1])["status"]
    words = ["ctl", str(live.path), "branch", told["episodes"][0]["episode_id"], "--n", "2", "--go"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ares_exp", *words),
        cwd=live.path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        branches = live.path.parent / "outputs"

        def under_way() -> int:
            assert process.returncode is None
            paths = [*branches.rglob("status.json")]
            for path in paths:
                look(path.parent / "control")
            found = [read_status(path) for path in paths]
            return sum(len(status.episodes) for status in found if status is not None)

        await until(lambda: under_way() == 2)
        os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(LIMIT_SEC):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 130, out.decode()
    assert f"branch_from={live.path}/" in out.decode()
    [path] = branches.rglob("episodes.jsonl")
    assert [json.loads(line)["outcome"] for line in path.read_text().splitlines()] == ["cancelled"] * 2


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "ended", [row("a", 0, 1.0)])
    assert main([str(tmp_path), "status"]) == 2
    assert "Expected the directory of a run, or the folder of a sweep" in capsys.readouterr().err
    assert main([str(tmp_path / "ended"), "stop"]) == 2
    assert "is not: finished" in capsys.readouterr().err
    assert not (tmp_path / "ended" / "control").exists()
    assert main([str(tmp_path / "ended"), "resume", "--now"]) == 2
    assert "`now`" in capsys.readouterr().err
    for words in (["status", "x"], ["cancel"], ["retry", "a", "b"], ["set", "concurrency"], ["stop", "--go"]):
        assert main([str(tmp_path / "ended"), *words]) == 2, words
    for wrong in (["explode"], ["pause", "--for", "soon"], ["pause", "--for", "10"]):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "ended"), *wrong])
    assert "expected a time such as 90s, 10m or 1h30m" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "the following arguments are required: RUN|SWEEP, ORDER\n" in capsys.readouterr().err


def test_a_sweep_keeps_orders_for_its_jobs_and_stop_is_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SWEEP_RECORD).touch()
    run_of(tmp_path / "0", [row("a", 0, 1.0)])
    assert main([str(tmp_path), "pause"]) == 2
    assert "Expected a sweep that is under way" in capsys.readouterr().err
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([str(tmp_path), "pause", "--reason", "why"]) == 0
        assert "no job is under way at this moment" in capsys.readouterr().out
        assert main([str(tmp_path), "status"]) == 0
        assert "under way, 1 job begun" in capsys.readouterr().out
        assert main([str(tmp_path), "stop"]) == 0
    finally:
        os.close(held)
    assert [json.loads(path.read_text())["verb"] for path in (tmp_path / "control").iterdir()] == ["pause"]
    assert (tmp_path / STOP).exists()
    noted = [json.loads(line) for line in (tmp_path / "control.jsonl").read_text().splitlines()]
    assert [line["verb"] for line in noted] == ["pause", "stop"]
