"""Results that a run recorded, durable appends, and the run that `latest` means."""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import run_path
from ares_exp.records.recorded_results import MAX_ROW_BYTES, read_results, recorded_summary
from ares_exp.records.results import EnvironmentUsage, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.records.run_dir import GatheredCalls, RunDir, append_durably, append_lines, syncing_together

pytestmark = pytest.mark.usefixtures("here")

RESULT = EpisodeResult(
    "a-0",
    "a",
    0,
    7,
    Outcome.AGENT_ERROR,
    None,
    {"reward": 0.5},
    ErrorInfo("AgentError", "boom"),
    phase_sec={"agent": 1.5},
    retry=1,
    replayed=Replayed("a-00", 2),
    environment_usage=EnvironmentUsage(30, 15, 0.5),
)


def _row(**changes: Any) -> bytes:
    return json.dumps({**RESULT.to_dict(), **changes}).encode() + b"\n"


def test_appended_results_are_read(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.touch()
    assert read_results(path).results == ()
    append_lines(path, RESULT.to_dict())
    append_lines(path, {**RESULT.to_dict(), "attempt": 1})
    found = read_results(path)
    assert [one.attempt for one in found.results] == [0, 1]
    assert found.results[0] == RESULT
    assert (found.torn, found.whole_bytes) == (False, path.stat().st_size)


def test_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    whole, last = _row(), _row(attempt=1)
    for length in range(1, len(last), 7):
        path.write_bytes(whole + last[:length])
        found = read_results(path)
        assert (found.results, found.torn, found.whole_bytes) == ((RESULT,), True, len(whole))
    path.write_bytes(whole + last[:-1])  # all but its end: it was not written whole
    assert read_results(path).results == (RESULT,)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{}\n", "episode_id"),
        (b"[]\n", "cannot read the result"),
        (b"{\n", "cannot read the result"),
        (b"\n", "cannot read the result"),
        (b"\x00\x00\xff\n", "cannot read the result"),
        (b"[" * 100_000 + b"\n", "cannot read the result"),
        (_row(reward=float("nan")), "NaN is not a valid JSON number"),
        (_row(reward=float("inf")), "Infinity is not a valid JSON number"),
        (_row().replace(b'"reward": null', b'"reward": 1e999'), "`reward` to be a finite number"),
        (_row(cost=1e200), "`cost` to be less than or equal to 1e\\+100"),
        (_row(reward="1.0x"), "reward"),
        (_row(prompt_tokens=-1), "`prompt_tokens` to be greater than or equal to 0"),
        (_row(generated_tokens=2**60), "`generated_tokens` to be less than or equal to"),
        (_row(outcome="splendid"), "outcome"),
        (_row(environment_usage={"prompt_tokens": -1}), "environment_usage.prompt_tokens"),
        (_row(environment_usage={"generated_tokens": 2**60}), "environment_usage.generated_tokens"),
        (_row(environment_usage={"cost": 1e200}), "environment_usage.cost"),
        (_row(environment_usage="much"), "environment_usage"),
        (_row(replayed={"episode_id": "e", "cost": 1e200}), "replayed.cost"),
        (_row(stages=[{"name": "a", "reward": 1.0, "rewards": {"x": 1e200}}]), "stages.0.rewards.x"),
        (b'{"episode_id": "' + b"x" * MAX_ROW_BYTES + b'"}\n', "more than"),
    ],
    ids=range(21),
)
def test_broken_line_is_refused_with_its_number(line: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(_row() + line + _row(attempt=1))
    with pytest.raises(ConfigError, match=what) as caught:
        read_results(path)
    assert "line 2:" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(_row(colour="blue"))
    assert read_results(path).results == (RESULT,)


def test_planned_attempts_are_bounded(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.episodes.write_bytes(_row())
    run_dir.provenance.write_text('{"tasks": ["a"]}')
    for attempts, planned in (("3", 3), (hex(16**5000), 1)):
        run_dir.config.write_text(f"attempts: {attempts}\n")
        summary = recorded_summary(run_dir)
        assert summary is not None
        assert summary.planned == planned


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_results(tmp_path / "episodes.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_results(tmp_path)


@pytest.mark.parametrize("line", ['{"episode_id": "a-0", "rewards": {"x": 1e300}}', "[]", '{"episode_id": "a-0"}', "{"])
def test_added_scores_join_rows_or_name_their_line(line: str, tmp_path: Path) -> None:
    scores = tmp_path / "scores" / "judge.jsonl"
    append_lines(tmp_path / "episodes.jsonl", RESULT.to_dict())
    append_lines(scores, {"config": {}}, {"episode_id": "a-0", "rewards": {"judge": 0.25, "reward": 1.0}})
    [row] = read_results(tmp_path / "episodes.jsonl").results
    assert (row.reward, row.rewards) == (None, {"reward": 0.5, "judge": 0.25}), "the first value stays"
    with scores.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match=r"judge\.jsonl, line 3: cannot read the scores of an episode"):
        read_results(tmp_path / "episodes.jsonl")


def start(place: str, *started: object) -> Path:
    """Writes a run directory whose sessions were started at these times."""
    path = Path(place)
    path.mkdir(parents=True)
    (path / "episodes.jsonl").touch()
    if started:
        lines = [json.dumps({"started": time, "pid": 7}) for time in started]
        (path / "sessions.jsonl").write_text("\n".join([*lines, '{"ended": 9e9}', ""]))
    return path


def test_latest_is_the_most_recently_started_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, resumed = start("outputs/z/2026-01-01", 100.0), start("outputs/mine", 200.0, 900.0)
    newest = start("outputs/a/2026-01-02_2", 300.0)
    for path in (old, resumed):
        os.utime(path, (2e9, 2e9))
        os.utime(path / "sessions.jsonl", (2e9, 2e9))
    assert run_path("latest") == newest
    assert run_path("latest/fix@3") == newest / "fix@3"
    assert capsys.readouterr().err == f"`latest` is {newest}\n" * 2


def test_latest_sweep_started_with_its_first_job() -> None:
    for job, started in (("0", 100.0), ("1", 900.0)):
        start(f"outputs/grid/{job}", started)
    Path("outputs/grid/multirun.yaml").touch()
    run = start("outputs/run", 200.0)
    assert run_path("latest") == run
    start("outputs/newer/lr=1/0", 300.0)
    Path("outputs/newer/multirun.yaml").touch()
    assert run_path("latest") == Path("outputs/newer")


def test_latest_ignores_task_checks() -> None:
    run = start("outputs/run", 100.0)
    start("outputs/task-check/2026-01-01/nothing", 200.0)
    assert run_path("latest") == run
    mine = start("outputs/mine/task-check", 300.0)
    assert run_path("latest") == mine


def test_latest_ignores_runs_without_a_start_time() -> None:
    start("outputs/merged")
    start("outputs/merged/parts/0", 900.0)
    for number, started in enumerate((None, "soon", float("inf"), [1], {}, 10**400)):
        start(f"outputs/broken/{number}", started)
    (start("outputs/no-object") / "sessions.jsonl").write_text("[]\n")
    (start("outputs/no-json") / "sessions.jsonl").write_text("[" * 100_000)
    os.mkfifo(start("outputs/pipe") / "sessions.jsonl")
    with pytest.raises(ConfigError, match=r"no run or sweep under outputs/ in"):
        run_path("latest")
    assert run_path("outputs/merged") == Path("outputs/merged")
    assert run_path("latest_run") == Path("latest_run")


def test_directory_named_latest_takes_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    start("outputs/run", 100.0)
    start("latest")
    assert run_path("latest/e1") == Path("latest/e1")
    assert run_path("/elsewhere/latest") == Path("/elsewhere/latest")
    assert capsys.readouterr().err == ""


def test_latest_without_outputs_is_an_error(here: Path) -> None:
    with pytest.raises(ConfigError, match=f"no run or sweep under outputs/ in {here} "):
        run_path("latest")


def fail(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda at: names.append(Path(f"/proc/self/fd/{at}").readlink().name))
    return names


def test_append_syncs_the_file_and_a_new_name(tmp_path: Path, synced: list[str]) -> None:
    append_durably(tmp_path / "rows", "1\n", flags=os.O_CREAT, is_new=True)
    append_durably(tmp_path / "rows", "2\n")
    assert synced == ["rows", tmp_path.name, "rows"]


def test_name_of_file_in_working_directory_is_synced(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    append_durably("rows", "whole\n", flags=os.O_CREAT, is_new=True)
    assert synced == ["rows", tmp_path.name]


def test_appends_of_a_group_are_synced_once(tmp_path: Path, synced: list[str]) -> None:
    with syncing_together():
        for number in range(3):
            append_durably(tmp_path / f"new {number}", "new", flags=os.O_CREAT, is_new=True)
            append_durably(tmp_path / "rows", f"{number}\n", flags=os.O_CREAT)
        assert not synced
    assert sorted(synced) == sorted(["new 0", "new 1", "new 2", "rows", tmp_path.name])
    append_durably(tmp_path / "rows", "3\n")
    assert synced[-1] == "rows"


def test_failed_sync_of_a_group_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), syncing_together():
        append_durably(tmp_path / "rows", "1\n", flags=os.O_CREAT)


def test_text_that_cannot_be_synced_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    append_durably(path, "whole\n", flags=os.O_CREAT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            append_durably(path, "lost\n")
    append_durably(path, "again\n")
    assert path.read_text() == "whole\nagain\n"


async def test_items_arriving_during_a_call_share_the_next() -> None:
    taken: list[Sequence[int]] = []
    loop, started, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def take(items: Sequence[int]) -> None:
        taken.append(items)
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(30)
        if 1 in items:
            raise OSError("no")

    calls = GatheredCalls(take)
    first = calls.put(0)
    async with asyncio.timeout(30):
        await started.wait()
    others = [calls.put(number) for number in range(1, 5)]
    may_end.set()
    await first
    found = await asyncio.gather(*others, return_exceptions=True)
    assert taken == [[0], [1, 2, 3, 4]]
    assert [type(one) for one in found] == [OSError] * 4
