"""Runs, trajectories and snapshots that an earlier commit wrote: they are shown, compared, converted and gone on with.

`tests/fixtures/make_runs.py` says how they were made, `tests/fixtures/small_runs.py` what was played in them.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ares_exp import CodeEnvironment, LLMResponse, load_task
from ares_exp.errors import SnapshotMismatchError, TrajectoryFormatError
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trajectories import load
from ares_exp.trajectories.commands.command_line import main
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.fixtures.earlier_runs import move_to_host, names, unpack
from tests.fixtures.small_runs import (
    DRAW,
    FINISHED,
    GREET,
    IN_STEPS,
    KILLED,
    SHOW,
    SUBMIT,
    Player,
    bash,
    grammar,
    scripted,
)

pytestmark = pytest.mark.once

PLAYED: dict[str, tuple[str, float | None, int]] = {
    "access-log-report": ("completed", 0.5, 3),
    "count-records": ("policy_error", None, 2),
    "publish-release": ("truncated", 0.0, 4),
    "write-greeting": ("completed", 1.0, 3),
}
"""Of each task of the run `finished`: outcome, reward, answers."""
EXPORTS = ("parquet", "atif")
"""Runs that have no trajectories but exports."""
QUIET = "tracker=none"

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def player(tmp_path: Path) -> Player:
    """Runs commands in a directory of their own."""
    return Player(tmp_path)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `python -m …` there in this process, and returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(module: str, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [module, *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            runpy.run_module(module, run_name="__main__")
        said = capsys.readouterr()
        assert exit_.value.code is not None
        return int(exit_.value.code), said.out + said.err

    return run


@pytest.fixture(scope="session")
def base_of_this_host(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What snapshots of local containers are relative to here."""
    place = tmp_path_factory.mktemp("base")
    words = ("snapshot=every_step", *scripted({"write-greeting": [SUBMIT]}), "hydra.run.dir=run")
    Player(place)(QUIET, *words)
    [snapshot] = (place / "run" / "snapshots").glob("*/snapshot.json")
    return str(json.loads(snapshot.read_text())["filesystem_base"])


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


def final(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The row of the last try of every attempt."""
    return {(row["task_name"], row["attempt"]): row for row in sorted(rows(run), key=lambda row: row["retry"])}


def trajectories(run: Path) -> dict[str, EpisodeTrajectory]:
    return {one.episode_id: one for one in load(run).trajectories()}


def with_records(run: Path) -> Path:
    """Follows the remedy with which a run is refused that has nothing but exports: runs go on from records alone."""
    with pytest.raises(TrajectoryFormatError, match="expected a record") as refused:
        load(run)
    remedy = re.search("`ares-exp (.*)`", str(refused.value))
    assert remedy is not None
    assert main(remedy[1].split()) == 0
    return run


def replies(episode: EpisodeTrajectory) -> list[str]:
    return ["".join(part["content"] for part in step.action["data"]) for step in episode.steps if step.action]


def shown(episode: EpisodeTrajectory, step: int) -> str:
    observation = episode.steps[step].observation
    assert observation is not None
    return str(observation["messages"][-1]["content"])


def instruction(task: str) -> str:
    return (SAMPLES / task / "instruction.md").read_text().strip()


# What is read, and not played.


@pytest.mark.parametrize(("run", "attempts"), [("finished", 2), ("jsonl", 1), ("parquet", 1), ("atif", 1)])
def test_trajectories_say_what_was_played(tmp_path: Path, run: str, attempts: int) -> None:
    place = unpack(run, tmp_path)
    found = trajectories(with_records(place) if run in EXPORTS else place)
    assert found.keys() == {row["episode_id"] for row in rows(place)}
    for row in rows(place):
        episode, task = found[row["episode_id"]], row["task_name"]
        outcome, reward, answers = PLAYED[task]
        assert (row["outcome"], row["reward"], row["num_steps"]) == PLAYED[task]
        assert (episode.task_name, episode.outcome, episode.total_reward) == (task, outcome, reward)
        assert replies(episode) == list(FINISHED[task][:answers])
        assert episode.num_steps == len(episode.steps) == answers + 1
        assert episode.truncated == (outcome == "truncated")
        assert (None if episode.error is None else episode.error.message) == (row["error"] or {}).get("message")
        assert (episode.metadata["seed"], episode.metadata["attempt"]) == (row["seed"], row["attempt"])
        ends = [reward] if reward is not None else []
        assert [step.reward for step in episode.steps] == [None, *[0.0] * (answers - len(ends)), *ends]
        assert instruction(task) in shown(episode, 0)
        counts = [len(step.observation["messages"]) for step in episode.steps if step.observation is not None]
        assert counts == [1 + 2 * step for step in range(len(counts))]
    assert len(found) == attempts * len(PLAYED)


def test_every_run_is_listed(tmp_path: Path, command: Command) -> None:
    for name in sorted({*names()} - {"sweep", "tasks"}):
        run = unpack(name, tmp_path)
        if name in (*EXPORTS, "killed_with_exports"):
            with_records(run)
        code, said = command("ares_exp.trajectories", "show", name, "--list")
        assert code == 0, said
        for row in rows(run):
            line = next(line for line in said.splitlines() if row["episode_id"] in line)
            assert row["outcome"] in line
            assert row["reward"] is None or f" {row['reward']:g} " in line


def test_an_episode_is_shown(tmp_path: Path, command: Command) -> None:
    unpack("finished", tmp_path)
    code, said = command("ares_exp.trajectories", "show", "finished/access-log-report__1", "--full")
    assert code == 0, said
    assert "I shall write one of the two reports." in said
    assert "<error>Expected exactly one fenced bash block in your reply, found 0." in said
    assert "$ cd /app && awk '$(NF - 1) >= 500' access.log > errors.txt; wc -l < errors.txt\n    exit 0" in said
    assert "step 3  LAST  reward 0.5  discount 0" in said


def test_formats_are_compared_with_each_other(tmp_path: Path, command: Command) -> None:
    for name in ("finished", "jsonl"):
        unpack(name, tmp_path)
    for name in EXPORTS:
        with_records(unpack(name, tmp_path))
    for other in ("jsonl", "parquet", "atif"):
        code, said = command(
            "ares_exp.trajectories", "diff", "finished/access-log-report__0", f"{other}/access-log-report"
        )
        assert (code, "equal: all 4 time steps" in said) == (0, True), said
    code, said = command("ares_exp.trajectories", "diff", "finished/access-log-report__0", "finished/write-greeting__0")
    assert code == 1, said


@pytest.mark.parametrize("run", ["finished", "jsonl", "parquet", "atif", "oracle", "branched"])
def test_trajectories_are_converted(tmp_path: Path, command: Command, run: str) -> None:
    place = unpack(run, tmp_path)
    code, said = command("ares_exp.trajectories", "convert", run, "out", "--to", "json")
    assert code == 0, said
    if run in EXPORTS:
        with_records(place)
    before, after = trajectories(place), {one.episode_id: one for one in load(tmp_path / "out").trajectories()}
    assert before == after


def test_training_data_is_made_of_them(tmp_path: Path, command: Command) -> None:
    unpack("finished", tmp_path)
    unpack("sweep", tmp_path)
    code, said = command("ares_exp.trajectories", "convert", "finished", "good.jsonl", "--to", "sft", "--min-reward=1")
    assert code == 0, said
    conversations = [json.loads(line)["messages"] for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    [messages] = conversations  # both attempts are the same
    assert [one["content"] for one in messages if one["role"] == "assistant"] == FINISHED["write-greeting"]
    words = ("convert", "sweep/0", "sweep/1", "pairs.jsonl", "--to", "preference", "--oracle")
    code, said = command("ares_exp.trajectories", *words)
    assert code == 0, said
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    for pair, task in zip(pairs, ("access-log-report", "write-greeting"), strict=True):
        assert instruction(task) in pair["prompt"][-1]["content"]
        assert [one["content"] for one in pair["chosen"] if one["role"] == "assistant"] == FINISHED[task]
        assert [one["content"] for one in pair["rejected"] if one["role"] == "assistant"] == FINISHED[task][:1]


@pytest.mark.parametrize("run", ["killed", "killed_with_snapshots", "killed_with_exports"])
def test_what_a_killed_run_left_is_recovered(tmp_path: Path, command: Command, run: str) -> None:
    place = unpack(run, tmp_path)
    code, said = command("ares_exp.trajectories", "recover", run)
    assert code == 0, said
    found = trajectories(with_records(place) if run == "killed_with_exports" else place)
    [lost] = [episode for episode in found.values() if episode.outcome == "lost"]
    assert (lost.task_name, lost.total_reward, lost.num_steps) == ("count-records", None, 3)
    assert replies(lost) == list(KILLED["count-records"][:2]), "the third was answered, and was not over"
    assert {episode.task_name for episode in found.values()} == {"access-log-report", "count-records"}


def test_the_jobs_of_a_sweep_are_compared(tmp_path: Path, command: Command) -> None:
    sweep = unpack("sweep", tmp_path)
    code, said = command("ares_exp.sweeps", "sweep", "--json")
    assert code == 0, said
    assert json.loads(said) == json.loads((sweep / "sweep.json").read_text())
    report = json.loads(said)
    assert (report["best"], [job["objective"] for job in report["jobs"]]) == ("1", [0.0, 0.75])
    code, said = command("ares_exp.compare", "sweep", "--json")
    assert code == 0, said
    [pair] = json.loads(said)["pairs"]
    assert (pair["errors_as_zero"]["value"], pair["errors_as_zero"]["tasks"]) == (0.75, 2)
    assert (pair["changed_tasks"], pair["only_a"], pair["only_b"]) == ([], [], [])
    assert [(flip["task_name"], flip["b_passed"]) for flip in pair["flips"]] == [("write-greeting", 1)]


def test_shards_are_merged(tmp_path: Path, command: Command) -> None:
    earlier = unpack("whole", tmp_path / "earlier")
    shards = [unpack(f"shard{number}", tmp_path) for number in (0, 1)]
    code, said = command("ares_exp.merge", "whole", "shard0", "shard1")
    assert code == 0, said
    results = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "earlier/whole")}
    assert results["whole"] == results["earlier/whole"]
    assert results["whole"]["totals"]["outcomes"] == {"completed": 6}
    assert trajectories(tmp_path / "whole") == trajectories(earlier)
    assert trajectories(earlier) == {**trajectories(shards[0]), **trajectories(shards[1])}
    code, said = command("ares_exp.compare", "earlier/whole", "whole", "--json")
    assert (code, json.loads(said)["pairs"][0]["errors_as_zero"]["value"]) == (0, 0.0)


def test_a_run_is_exported_as_a_harbor_job(tmp_path: Path, command: Command) -> None:
    unpack("finished", tmp_path)
    code, said = command("ares_exp.export_job", "finished")
    assert (code, "8 trials, 2 of them with an error" in said) == (0, True), said
    stats = json.loads((tmp_path / "jobs" / "finished" / "result.json").read_text())["stats"]
    [evals] = stats["evals"].values()
    rewards = {reward: len(trials) for reward, trials in evals["reward_stats"]["reward"].items()}
    assert rewards == {"0.0": 2, "0.5": 2, "1.0": 2}


def test_snapshots_are_whole(tmp_path: Path, command: Command) -> None:
    places = {"snapshots": 2, "branched": 6, "killed_with_snapshots": 5, "killed_in_the_second_step": 4}
    for name in (*places, "played_again"):
        unpack(name, tmp_path)
    code, said = command("ares_exp.snapshots", "verify", *places, "played_again/branch_point")
    assert (code, "18 of 18 snapshots are whole." in said) == (0, True), said
    for name, count in places.items():
        code, said = command("ares_exp.snapshots", "list", name)
        assert (code, f"{count} snapshots" in said) == (0, True), said
    [episode] = trajectories(tmp_path / "snapshots").values()
    code, said = command("ares_exp.snapshots", "show", f"snapshots/{episode.episode_id}@1", "--files")
    assert (code, "/tmp/drawn" in said, shown(episode, 1).splitlines()[2] in said) == (0, True, True), said
    code, said = command("ares_exp.snapshots", "gc", "branched", "--keep=1", "--dry-run", "--grace=0")
    assert (code, "4 snapshots" in said) == (0, True), said


# What is played on.


@pytest.mark.local
@pytest.mark.parametrize(("run", "from_snapshot"), [("killed", None), ("killed_with_snapshots", 2)])
def test_a_killed_run_is_resumed(
    tmp_path: Path, player: Player, base_of_this_host: str, run: str, from_snapshot: int | None
) -> None:
    place = unpack(run, tmp_path)
    move_to_host(place / "snapshots", base_of_this_host)
    before = (place / "episodes.jsonl").read_bytes()
    [lost] = (place / "answers").glob("*.jsonl")
    player(f"resume={run}")
    assert (place / "episodes.jsonl").read_bytes().startswith(before), "what is finished stays as it is"
    assert {task: (row["outcome"], row["reward"], row["retry"]) for (task, _), row in final(place).items()} == {
        "access-log-report": ("completed", 0.5, 0),
        "count-records": ("completed", 1.0, 1),
        "write-greeting": ("completed", 1.0, 0),
    }
    _, died, again, _ = rows(place)
    assert (died["episode_id"], died["outcome"], died["num_steps"]) == (lost.stem, "lost", 3)
    replayed = again["replayed"]
    assert (replayed["episode_id"], replayed["steps"], replayed["diverged_at"]) == (lost.stem, 3, None)
    assert replayed["from_snapshot"] == from_snapshot
    assert again["num_steps"] == 6
    episode = trajectories(place)[again["episode_id"]]
    assert replies(episode) == KILLED["count-records"]
    assert "\n1\n2\n3\n4\n" in shown(episode, 4), "each command has run once in its container"
    assert not (place / "answers").exists()
    totals = json.loads((place / "summary.json").read_text())
    assert (totals["planned"], totals["finished"], totals["tries"]) == (3, 3, 4)


@pytest.mark.nightly
@pytest.mark.local
def test_no_recorded_answer_is_asked_for_again(tmp_path: Path, player: Player) -> None:
    """The script has other replies for what was answered before: they would be seen."""
    place = unpack("killed_with_exports", tmp_path)
    spoiled = {task: [bash("rm -r /app")] * 2 for task in KILLED}
    spoiled["count-records"] = [bash("rm -r /app")] * 3 + list(KILLED["count-records"][3:])
    spoiled["write-greeting"] = list(KILLED["write-greeting"])
    done = player("resume=killed_with_exports", "resume_force=true", *scripted(spoiled)[:2])
    assert "not the same any more" in done.stderr
    assert {task: row["reward"] for (task, _), row in final(place).items()} == {
        "access-log-report": 0.5,
        "count-records": 1.0,
        "write-greeting": 1.0,
    }
    assert replies(trajectories(with_records(place))[rows(place)[2]["episode_id"]]) == KILLED["count-records"]


@pytest.mark.local
def test_an_episode_is_resumed_in_its_second_step(tmp_path: Path, player: Player, base_of_this_host: str) -> None:
    """Its tasks are elsewhere now, which has to be allowed."""
    place = unpack("killed_in_the_second_step", tmp_path)
    move_to_host(place / "snapshots", base_of_this_host)
    tasks = unpack("tasks", tmp_path)
    player("resume=killed_in_the_second_step", f"env.path={tasks}", "resume_force=true")
    lost, again = rows(place)
    assert (lost["outcome"], lost["num_steps"]) == ("lost", 4)
    assert (again["outcome"], again["reward"], again["num_steps"]) == ("completed", 1.0, 7)
    assert (again["replayed"]["steps"], again["replayed"]["from_snapshot"]) == (4, 3)
    assert [(stage["name"], stage["reward"], stage["num_steps"]) for stage in again["stages"]] == [
        ("one", 1.0, 2),
        ("two", 1.0, 5),
    ]
    assert replies(trajectories(place)[again["episode_id"]]) == IN_STEPS["two-steps"]


@pytest.mark.nightly
@pytest.mark.local
def test_a_finished_run_gets_more_attempts_and_tries(tmp_path: Path, player: Player) -> None:
    place = unpack("finished", tmp_path)
    before = (place / "episodes.jsonl").read_bytes()
    player("resume=finished", "attempts=3", "resume_redo=[policy_error]", code=1)
    assert (place / "episodes.jsonl").read_bytes().startswith(before)
    new = rows(place)[8:]
    added = {row["task_name"]: (row["outcome"], row["reward"], row["num_steps"]) for row in new if row["attempt"] == 2}
    assert added == PLAYED
    again = [row for row in new if row["attempt"] != 2]
    assert [(row["task_name"], row["retry"], row["replayed"]["steps"]) for row in again] == [
        ("count-records", 1, 2)
    ] * 2
    assert {row["error"]["message"].partition(", and")[0] for row in again} == {
        "The script for task 'count-records' has 2 replies"
    }


@pytest.mark.nightly
@pytest.mark.local
def test_the_job_of_a_sweep_that_is_not_complete_is_played(tmp_path: Path, player: Player) -> None:
    place = unpack("sweep", tmp_path)
    of_the_complete, of_the_other = (place / job / "episodes.jsonl" for job in "01")
    before = of_the_complete.read_bytes()
    kept = [line for line in of_the_other.read_text().splitlines(keepends=True) if "write-greeting" not in line]
    of_the_other.write_text("".join(kept))
    player("resume=sweep")
    assert of_the_complete.read_bytes() == before
    assert of_the_other.read_text().splitlines(keepends=True)[:-1] == kept
    assert {task: row["reward"] for (task, _), row in final(place / "1").items()} == {
        "access-log-report": 0.5,
        "write-greeting": 1.0,
    }
    report = json.loads((place / "sweep.json").read_text())
    assert [(job["state"], job["objective"]) for job in report["jobs"]] == [("complete", 0.0), ("complete", 0.75)]


def compared(run: Path) -> dict[str, Any]:
    return json.loads((run / "replay.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.local
def test_a_run_is_replayed(tmp_path: Path, player: Player) -> None:
    unpack("finished", tmp_path)
    player("replay=finished", "hydra.run.dir=again", code=1)
    report = compared(tmp_path / "again")
    assert (report["score"], report["matching_steps"], report["compared_steps"]) == (1.0, 26, 26)
    for episode in report["episodes"]:
        outcome, reward, _ = PLAYED[episode["task_name"]]
        assert episode["outcome"] == {"recorded": outcome, "now": outcome}
        assert episode["reward"] == {"recorded": reward, "now": reward}


@pytest.mark.local
@pytest.mark.parametrize("run", ["jsonl", "parquet"])
def test_an_episode_of_another_format_is_replayed(tmp_path: Path, player: Player, run: str) -> None:
    place = unpack(run, tmp_path)
    if run in EXPORTS:
        with_records(place)
    player(f"replay={run}/access-log-report", "hydra.run.dir=again")
    report = compared(tmp_path / "again")
    assert (report["score"], report["compared_steps"]) == (1.0, 3)
    assert report["episodes"][0]["reward"] == {"recorded": 0.5, "now": 0.5}


def branch(player: Player, start: str, answers: Sequence[str], *overrides: str) -> str:
    """Branches to the run `new`, and returns what was said on stderr."""
    words = (QUIET, f"branch_from={start}", f"policy.replies={grammar({'*': answers})}", "hydra.run.dir=new")
    return player(*words, *overrides).stderr


@pytest.mark.local
def test_branches_go_on_from_a_snapshot(tmp_path: Path, player: Player, base_of_this_host: str) -> None:
    place = unpack("snapshots", tmp_path)
    move_to_host(place / "snapshots", base_of_this_host)
    branch(player, "snapshots/write-greeting@1", [SHOW, GREET, SUBMIT], "branches=2")
    [recorded] = trajectories(place).values()
    assert [row["reward"] for row in rows(place)] == [0.0]
    assert [(row["reward"], row["num_steps"]) for row in rows(tmp_path / "new")] == [(1.0, 3)] * 2
    for episode in trajectories(tmp_path / "new").values():
        assert replies(episode) == [DRAW, SHOW, GREET, SUBMIT]
        assert shown(episode, 1) == shown(recorded, 1), "the recorded output"
        assert shown(episode, 2) == shown(recorded, 1), "the file is there: what drew it did not run again"
        lineage = episode.metadata["lineage"]
        assert (lineage["parent"], lineage["step"]) == (recorded.episode_id, 1)


@pytest.mark.local
def test_a_branch_goes_on_from_a_branch(tmp_path: Path, player: Player, base_of_this_host: str) -> None:
    place = unpack("branched", tmp_path)
    move_to_host(place / "snapshots", base_of_this_host)
    earlier = next(one for one in trajectories(place).values() if one.metadata["attempt"] == 1)
    branch(player, f"branched/{earlier.episode_id}@3", [SUBMIT], "snapshot=none")
    [episode] = trajectories(tmp_path / "new").values()
    assert (episode.total_reward, replies(episode)) == (1.0, [DRAW, SHOW, GREET, SUBMIT])
    lineage, root = episode.metadata["lineage"], earlier.metadata["lineage"]["root"]
    assert (lineage["root"], lineage["parent"], lineage["step"]) == (root, earlier.episode_id, 3)
    assert shown(episode, 1) == "Look at what was drawn."


@pytest.mark.local
@pytest.mark.parametrize("run", ["finished", "atif"])
def test_a_run_without_snapshots_is_played_again_up_to_the_branch(tmp_path: Path, player: Player, run: str) -> None:
    place = unpack(run, tmp_path)
    if run in EXPORTS:
        with_records(place)
    said = branch(player, f"{run}/write-greeting__0@2", [SUBMIT])
    assert "differs" not in said
    [episode] = trajectories(tmp_path / "new").values()
    assert (episode.total_reward, replies(episode)) == (1.0, FINISHED["write-greeting"])
    recorded = trajectories(place)[episode.metadata["lineage"]["parent"]]
    assert [step.observation for step in episode.steps[:3]] == [step.observation for step in recorded.steps[:3]]
    assert rows(tmp_path / "new")[0]["num_steps"] == 1


@pytest.mark.local
async def test_a_snapshot_is_restored(tmp_path: Path, base_of_this_host: str) -> None:
    place = unpack("snapshots", tmp_path)
    move_to_host(place / "snapshots", base_of_this_host)
    [snapshot] = (place / "snapshots").glob("*@1")
    [recorded] = trajectories(place).values()
    with pytest.raises(SnapshotMismatchError, match=re.escape("Give `task`.")):
        await CodeEnvironment.load_from_state(snapshot)
    environment = await CodeEnvironment.load_from_state(snapshot, task=load_task(SAMPLES / "write-greeting"))
    async with environment:
        assert environment.step_count == 1
        assert environment.time_step is not None
        assert environment.time_step.observation is not None
        assert recorded.steps[1].observation is not None
        messages = [dict(message) for message in environment.time_step.observation.messages]
        assert messages == list(recorded.steps[1].observation["messages"])
        time_step = await environment.step(LLMResponse.from_text(SHOW))
        assert time_step.observation.messages[-1]["content"] == shown(recorded, 1)
        await environment.step(LLMResponse.from_text(GREET))
        time_step = await environment.step(LLMResponse.from_text(SUBMIT))
        assert (time_step.last(), time_step.reward, time_step.discount) == (True, 1.0, 0.0)


def test_runs_of_a_plugin_go_on(tmp_path: Path, player: Player) -> None:
    place = unpack("nim", tmp_path)
    before = (place / "episodes.jsonl").read_bytes()
    player("resume=nim", "attempts=2")
    assert (place / "episodes.jsonl").read_bytes().startswith(before)
    assert {slot: row["reward"] for slot, row in final(place).items()} == {
        (task, attempt): 1.0 for task in ("nim_3", "nim_5") for attempt in (0, 1)
    }


@pytest.mark.parametrize(
    ("run", "played"),
    [
        ("questions", {"cat": ("completed", 1.0, 2), "dog": ("truncated", 0.0, 5)}),
        ("questions_to_a_model", {"cat": ("completed", 1.0, 2)}),
    ],
)
def test_games_of_twenty_questions_go_on(
    tmp_path: Path, player: Player, run: str, played: dict[str, tuple[str, float, int]]
) -> None:
    place = unpack(run, tmp_path)
    assert {row["task_name"]: (row["outcome"], row["reward"], row["num_steps"]) for row in rows(place)} == played
    player(f"resume={run}", "attempts=2")
    assert {slot: (row["outcome"], row["reward"], row["num_steps"]) for slot, row in final(place).items()} == {
        (task, attempt): facts for task, facts in played.items() for attempt in (0, 1)
    }


def test_a_game_is_replayed(tmp_path: Path, player: Player) -> None:
    unpack("questions", tmp_path)
    player("replay=questions", "hydra.run.dir=again")
    report = compared(tmp_path / "again")
    assert (report["score"], report["compared_steps"]) == (1.0, 7)
