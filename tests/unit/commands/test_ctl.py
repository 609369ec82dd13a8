import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.commands.cli.run_command import run_command
from ares_exp.records.run_dir import STOP, SWEEP_RECORD
from ares_exp.runs.control import run_control
from tests.unit.commands.recorded import row, run_of

LIMIT_SEC = 60
SLOW = """\
_target_: tests.slow_policy.SlowPolicy
delay_sec: 0.05
replies: ["```bash\\ntrue\\n```"]
repeat_last: true
"""


def main(*words: str | Path) -> int:
    return run_command("ctl", [*map(str, words)], "ares-exp ctl")


class Live:
    def __init__(self, path: Path, running: asyncio.Task[Any], capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.running, self._capsys = path, running, capsys

    async def ctl(self, *words: str) -> tuple[int, str]:
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, self.path, *words)
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


@pytest.fixture
async def live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Live]:
    monkeypatch.setattr(run_control, "LOOK_SEC", 0.05)
    monkeypatch.setattr(run_control, "WATCHED_WRITE_SEC", 0.1)
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "slow.yaml").write_text(SLOW)
    path = tmp_path / "run"
    words = ["policy=slow", "env.tasks=[write-greeting]", "attempts=3", "container=local", "tracker=none"]
    limits = ["limits.steps=10000", "concurrency=2", f"hydra.run.dir={path}"]
    running = asyncio.create_task(ares_exp.arun([*words, *limits], config_dirs=[tmp_path / "conf"], quiet=True))
    try:
        async with asyncio.timeout(LIMIT_SEC):
            while not (path / "status.json").exists():
                assert not running.done() or running.result()
                await asyncio.sleep(0.02)
        yield Live(path, running, capsys)
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=LIMIT_SEC)


@pytest.mark.local
async def test_run_can_be_paused_and_resumed(live: Live) -> None:
    code, said = await live.ctl("status")
    assert code == 0
    assert "running, 2 of at most 2 episodes running, 1 queued, 0 ended" in said
    assert said.count("write-greeting__") == 2
    told = json.loads((await live.ctl("status", "--json"))[1])
    assert (told["state"], told["status"]["state"], told["status"]["concurrency"]) == ("running", "running", 2)
    code, said = await live.ctl("pause", "--now", "--reason", "a \x1b[2J reason")
    assert (code, "2 running episodes will wait at the next request" in said) == (0, True)
    said = (await live.ctl("status"))[1]
    assert "paused: requests to the policy wait (by " in said
    assert "\x1b" not in said
    assert "Resumed after" in (await live.ctl("resume"))[1]
    told = json.loads((await live.ctl("stop", "--json"))[1])
    assert [one["outcome"] for one in told["outcomes"]] == ["done"]
    async with asyncio.timeout(LIMIT_SEC):
        results = await live.running
    assert results.exit_code == 130
    noted = [json.loads(line) for line in (live.path / "control.jsonl").read_text().splitlines()]
    assert [(line["verb"], line["outcome"]) for line in noted] == [(v, "done") for v in ("pause", "resume", "stop")]
    assert noted[0]["uid"] == os.getuid()
    assert (await live.ctl("status"))[1] == f"{live.path}: interrupted\n"
    code, said = await live.ctl("pause")
    assert (code, "Expected a run in progress" in said) == (2, True)
    assert list((live.path / "control").glob("*.json")) == []


@pytest.mark.local
async def test_settings_change_and_episodes_are_cancelled(live: Live) -> None:
    code, said = await live.ctl("set", "concurrency=3", "budget.cost=2.5", "--reason", "more")
    assert (code, "The run now uses concurrency=3, budget.cost=2.5." in said) == (0, True)
    assert "budget.cost=2.5: 0 spent" in (await live.ctl("status"))[1]
    assert (await live.ctl("set", "seed=3"))[0] == 1
    told = json.loads((await live.ctl("status", "--json"))[1])["status"]
    episode_id = told["episodes"][0]["episode_id"]
    assert "1 episode cancelled" in (await live.ctl("cancel", episode_id))[1]
    async with asyncio.timeout(LIMIT_SEC):
        while not (lines := (live.path / "episodes.jsonl").read_text().splitlines()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [(row["episode_id"], row["outcome"]) for row in map(json.loads, lines)] == [(episode_id, "cancelled")]


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "ended", [row("a", 0, 1.0)])
    assert main(tmp_path, "status") == 2
    assert "Expected the directory of a run, or the folder of a sweep" in capsys.readouterr().err
    assert main(tmp_path / "ended", "stop") == 2
    assert "is finished" in capsys.readouterr().err
    assert not (tmp_path / "ended" / "control").exists()
    assert main(tmp_path / "ended", "resume", "--now") == 2
    assert "`now`" in capsys.readouterr().err
    for words in (["status", "x"], ["stop", "x"], ["cancel"], ["cancel", "a", "b"], ["set", "concurrency"]):
        assert main(tmp_path / "ended", *words) == 2, words
    for wrong in (["explode"], ["retry", "a"], ["pause", "--for", "soon"], ["pause", "--for", "10"]):
        with pytest.raises(SystemExit):
            main(tmp_path / "ended", *wrong)
    assert "expected a time such as 90s, 10m or 1h30m" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main()
    assert "the following arguments are required: RUN|SWEEP, COMMAND\n" in capsys.readouterr().err


def test_sweep_stores_commands_for_its_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / SWEEP_RECORD).touch()
    run_of(tmp_path / "0", [row("a", 0, 1.0)])
    assert main(tmp_path, "pause") == 2
    assert "Expected a sweep in progress" in capsys.readouterr().err
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(tmp_path, "pause", "--reason", "why") == 0
        assert "no job is running now" in capsys.readouterr().out
        assert main(tmp_path, "status") == 0
        assert ": running, 1 job started" in capsys.readouterr().out
        assert main(tmp_path, "stop") == 0
    finally:
        os.close(held)
    assert [json.loads(path.read_text())["verb"] for path in (tmp_path / "control").iterdir()] == ["pause"]
    assert (tmp_path / STOP).exists()
    noted = [json.loads(line) for line in (tmp_path / "control.jsonl").read_text().splitlines()]
    assert [line["verb"] for line in noted] == ["pause", "stop"]
