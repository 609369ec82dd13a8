"""State of earlier sessions: rows for lost episodes, useful responses, and owed episodes."""

import asyncio
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError, PolicyError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.records.results import EpisodeResult, Outcome, Replayed, RunSummary
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.runs.resume.session import PreviousSessions, load_previous_sessions
from ares_exp.runs.retries import RetryRules
from ares_exp.runs.scheduler import PlannedEpisode, episode_seed, plan_episodes
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from ares_exp.trajectories.files.episode_file import dump_episode, find_headers
from ares_exp.trajectories.recorded_responses import Exchange
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.response_log import LoggedEpisode, logged_episodes
from tests.leaks import wait_until
from tests.unit.runs.resume.logs import log_in
from tests.unit.runs.test_experiment import REQUEST, Responses, RunInfo, execute, experiment, rows
from tests.unit.trajectories.chats import chat, write

RESPONSE = LLMResponse.from_text("ls", cost=0.5, usage=Usage(prompt_tokens=10, generated_tokens=2))


def row(
    episode_id: str, outcome: str, *, task: str = "fix", retry: int = 0, seed: int = 7, **more: Any
) -> EpisodeResult:
    reward = 1.0 if outcome in ("completed", "truncated") else None
    return EpisodeResult(episode_id, task, 0, seed, Outcome(outcome), reward, retry=retry, **more)


def log(
    episode_id: str, *, task: str = "fix", retry: int = 0, seed: int = 7, parent: str | None = None
) -> LoggedEpisode:
    return LoggedEpisode(episode_id, task, 0, retry, seed, started_at=1.0, parent=parent)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "episodes.jsonl").touch()
    return RunDir(tmp_path)


def leave(run_dir: RunDir, *what: EpisodeResult | LoggedEpisode, responses: int = 3) -> None:
    """Rows, and logs with so many responses."""
    for one in what:
        if isinstance(one, EpisodeResult):
            run_dir.append_episodes(dump_json(one.to_dict()))
            continue
        written = log_in(run_dir.responses, one)
        exchange = Exchange(serialize_llm_request(LLMRequest([])), RESPONSE)
        written.start([exchange] * (responses if one.parent is not None else 0))
        for _ in range(responses if one.parent is None else 1):
            written.append(LLMRequest([]), RESPONSE)


def owed(earlier: PreviousSessions, *tasks: str, redo: tuple[str, ...] = ()) -> list[PlannedEpisode]:
    return earlier.owed(plan_episodes(tasks or ["fix"], attempts=1, seed=0), run_seed=0, redo=redo)


def outcomes(run_dir: RunDir) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in run_dir.episodes.read_text().splitlines()]
    return [(row["episode_id"], row["outcome"]) for row in rows]


def test_empty_run_owes_every_episode(run_dir: RunDir) -> None:
    earlier = load_previous_sessions(run_dir)
    assert (earlier.results, earlier.logs) == ((), {})
    [one] = owed(earlier)
    assert (one.retry, one.earlier, one.seed) == (0, None, episode_seed(0, "fix", 0))


@pytest.mark.parametrize("outcome", ["completed", "truncated"])
def test_episode_with_a_result_is_not_owed(run_dir: RunDir, outcome: str) -> None:
    leave(run_dir, row("a", outcome), log("a"))
    earlier = load_previous_sessions(run_dir)
    assert owed(earlier) == []
    assert logged_episodes(run_dir.responses) == []


@pytest.mark.parametrize("outcome", ["policy_error", "agent_error", "container_error", "verifier_error", "errored"])
def test_error_is_repeated_only_with_redo(run_dir: RunDir, outcome: str) -> None:
    leave(run_dir, row("a", outcome), log("a"))
    earlier = load_previous_sessions(run_dir)
    assert owed(earlier) == []
    assert owed(earlier, redo=("completed",)) == []
    [one] = owed(earlier, redo=(outcome,))
    assert one.earlier is not None
    assert (one.retry, one.seed, one.earlier.episode_id, len(one.earlier.exchanges)) == (1, 7, "a", 3)


def test_redo_without_responses_has_a_new_seed(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "completed", retry=2))
    [one] = owed(load_previous_sessions(run_dir), redo=("completed",))
    assert (one.retry, one.earlier, one.seed) == (3, None, episode_seed(0, "fix", 0, 3))


@pytest.mark.parametrize("outcome", ["cancelled", "lost", "abandoned", "closed"])
def test_cancelled_episode_without_responses_keeps_its_seed(run_dir: RunDir, outcome: str) -> None:
    leave(run_dir, row("a", outcome, retry=1, seed=99))
    [one] = owed(load_previous_sessions(run_dir))
    assert (one.retry, one.earlier, one.seed) == (2, None, 99)


def test_episode_in_progress_is_resumed_first(run_dir: RunDir) -> None:
    leave(run_dir, row("b", "completed", task="sum"), log("a", task="fix"))
    earlier = load_previous_sessions(run_dir)
    assert outcomes(run_dir) == [("b", "completed"), ("a", "lost")]
    lost = earlier.results[1]
    assert (lost.num_steps, lost.prompt_tokens, lost.generated_tokens, lost.cost) == (3, 30, 6, 1.5)
    assert (lost.seed, lost.retry, lost.reward, lost.replayed) == (7, 0, None, None)
    tasks = [(one.task_name, one.retry) for one in owed(earlier, "new", "sum", "fix")]
    assert tasks == [("fix", 1), ("new", 0)]


def test_sessions_are_settled_only_once(run_dir: RunDir) -> None:
    leave(run_dir, log("a"), log("b", task="sum"))
    first, second = load_previous_sessions(run_dir), load_previous_sessions(run_dir)
    assert (first.results, first.logs) == (second.results, second.logs)
    assert (first.lost, second.lost) == (first.results, ())
    assert len(outcomes(run_dir)) == 2


def test_resumed_episode_is_paid_once(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "lost", num_steps=3, prompt_tokens=30, generated_tokens=6, cost=1.5))
    leave(run_dir, log("b", retry=1, parent="a"))
    earlier = load_previous_sessions(run_dir)
    replayed = earlier.results[1].replayed
    assert replayed == Replayed("a", steps=3, prompt_tokens=30, generated_tokens=6, cost=1.5)
    paid = RunSummary(planned=1, results=earlier.results).paid()
    assert paid == {"prompt_tokens": 40, "generated_tokens": 8, "cost": 2.0}


def test_prefetched_response_is_paid_once(run_dir: RunDir) -> None:
    first, second = log_in(run_dir.responses, log("a")), log_in(run_dir.responses, log("b", retry=1, parent="a"))
    first.start(())
    for _ in range(3):
        first.append_ahead(LLMRequest([]), RESPONSE)
    earlier = load_previous_sessions(run_dir)
    [one] = owed(earlier)
    assert one.earlier is not None
    [lost] = earlier.results
    assert (lost.num_steps, lost.prompt_tokens, len(one.earlier.exchanges), len(one.earlier.ahead)) == (0, 30, 0, 3)
    second.start(one.earlier.exchanges, one.earlier.ahead)
    first.discard()
    second.append(LLMRequest([]), RESPONSE)
    second.apply(1)
    earlier = load_previous_sessions(run_dir)
    assert (earlier.results[1].num_steps, earlier.results[1].prompt_tokens) == (2, 40)
    assert earlier.results[1].replayed == Replayed("a", steps=3, prompt_tokens=30, generated_tokens=6, cost=1.5)
    assert RunSummary(planned=1, results=earlier.results).paid()["prompt_tokens"] == 40


def test_kill_between_two_logs_keeps_the_newer(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "lost"), log("a"), log("b", retry=1, parent="a"))
    [one] = owed(load_previous_sessions(run_dir))
    assert one.earlier is not None
    assert (one.retry, one.earlier.episode_id, len(one.earlier.exchanges)) == (2, "b", 4)
    assert [left.episode_id for left in logged_episodes(run_dir.responses)] == ["b"]


def test_try_that_ended_early_keeps_earlier_responses(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "lost"), log("a"), row("b", "cancelled", retry=1), row("c", "container_error", retry=2))
    earlier = load_previous_sessions(run_dir)
    assert owed(earlier) == []
    [one] = owed(earlier, redo=("container_error",))
    assert one.earlier is not None
    assert (one.retry, one.earlier.episode_id) == (3, "a")


def test_obsolete_response_logs_are_deleted(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "lost"), log("a"), row("b", "completed", retry=1), log("b", retry=1))
    leave(run_dir, row("c", "abandoned", task="sum"), log("c", task="sum"))
    earlier = load_previous_sessions(run_dir)
    assert earlier.logs == {}
    assert logged_episodes(run_dir.responses) == []
    [one] = owed(earlier, "fix", "sum")
    assert (one.task_name, one.earlier) == ("sum", None)


def test_ended_episode_gets_its_missing_row(run_dir: RunDir) -> None:
    in_progress = log_in(run_dir.responses, log("e0"))
    in_progress.start([])
    in_progress.append(LLMRequest([]), RESPONSE)
    ended = row("e0", "completed", rewards={"reward": 1.0, "lines": 3.0}, phase_sec={"agent": 2.0}, container_image="i")
    in_progress.end(dump_json(ended.to_dict()))
    earlier = load_previous_sessions(run_dir)
    assert earlier.results == earlier.lost == (ended,)
    assert outcomes(run_dir) == [("e0", "completed")]
    assert owed(earlier) == []
    assert logged_episodes(run_dir.responses) == []


@pytest.mark.parametrize("outcome", ["completed", "container_error"])
def test_episode_with_only_a_trajectory_is_lost(run_dir: RunDir, outcome: str) -> None:
    leave(run_dir, log("e0"))
    ended = replace(chat("e0", "fix"), outcome=outcome, total_reward=None, end_time=1e6)
    write(run_dir.trajectories / "e0.json", ended)
    [lost] = load_previous_sessions(run_dir).results
    assert (lost.outcome, lost.reward, lost.num_steps, lost.finished_at) == ("lost", None, 3, 1e6)


def test_unanswered_request_is_not_a_step(run_dir: RunDir) -> None:
    in_progress = log_in(run_dir.responses, log("b", retry=1, parent="a"))
    unanswered = Exchange(serialize_llm_request(LLMRequest([])), None)
    in_progress.start([unanswered, unanswered._replace(response=RESPONSE), unanswered])
    in_progress.append(LLMRequest([]), RESPONSE)
    [lost] = load_previous_sessions(run_dir).results
    assert (lost.num_steps, lost.cost) == (2, 1.0)
    assert lost.replayed is not None
    assert (lost.replayed.steps, lost.replayed.cost) == (1, 0.5)


@pytest.mark.parametrize("name", ["trajectories/e0.json", "trajectories.jsonl"])
def test_torn_trajectory_is_ended_as_lost(run_dir: RunDir, name: str) -> None:
    leave(run_dir, log("e0"))
    path = run_dir.path / name
    lines = list(dump_episode(chat("e0", "fix"), shared=path.suffix == ".jsonl"))
    run_dir.trajectories.mkdir()
    path.write_text("".join(lines[:2]) + lines[2][:5])
    (run_dir.trajectories / "e1.json").touch()
    [lost] = load_previous_sessions(run_dir).results
    assert (lost.outcome, lost.finished_at) == ("lost", chat().steps[0].timestamp)
    written = path.read_text()
    assert written.startswith("".join(lines[:2]))
    [found] = find_headers(path)
    assert found.ended is not None
    assert (found.ended.outcome, found.ended.num_steps) == ("lost", 1)
    load_previous_sessions(run_dir)
    assert path.read_text() == written


def test_broken_trajectory_is_unchanged(run_dir: RunDir) -> None:
    lines = list(dump_episode(chat("e0", "fix")))
    run_dir.trajectories.mkdir()
    path = run_dir.trajectories / "e0.json"
    path.write_text("".join([*lines[:2], "{\n", lines[3]]))
    before = path.read_text()
    load_previous_sessions(run_dir)
    assert path.read_text() == before


@pytest.mark.parametrize("torn", ['{"episode_id": "b", "task', '{"episode_id": "b"}', "\0" * 10])
def test_incomplete_last_row_is_rewritten(run_dir: RunDir, torn: str) -> None:
    leave(run_dir, row("a", "completed"), log("b", task="sum"))
    with run_dir.episodes.open("a") as file:
        file.write(torn)
    load_previous_sessions(run_dir)
    assert outcomes(run_dir) == [("a", "completed"), ("b", "lost")]


def test_temporary_files_are_removed(run_dir: RunDir) -> None:
    leave(run_dir, row("a", "cancelled"), log("a"))
    for folder in (run_dir.path, run_dir.responses):
        (folder / ".summary.json.17.tmp").write_text("{")
    load_previous_sessions(run_dir)
    assert list(run_dir.path.rglob("*.tmp")) == []
    assert [one.episode_id for one in logged_episodes(run_dir.responses)] == ["a"]


def test_full_disk_keeps_the_responses(run_dir: RunDir) -> None:
    leave(run_dir, log("a"))
    run_dir.episodes.unlink()
    run_dir.episodes.symlink_to("/dev/full")
    with pytest.raises((OSError, ConfigError)):
        load_previous_sessions(run_dir)
    assert [one.episode_id for one in logged_episodes(run_dir.responses)] == ["a"], "the responses are still there"


def test_attempts_are_outermost_and_ids_unique() -> None:
    plan = plan_episodes(["b", "a"], attempts=2, seed=0)
    assert [(item.task_name, item.attempt) for item in plan] == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]
    assert len({item.episode_id for item in plan}) == 4


def test_seeds_depend_on_run_task_and_attempt_only() -> None:
    first, second = (plan_episodes(["x", "y"], attempts=3, seed=7) for _ in range(2))
    assert [item.seed for item in first] == [item.seed for item in second]
    assert len({item.seed for item in first}) == 6
    [alone] = plan_episodes(["y"], attempts=1, seed=7)
    assert alone.seed == next(item.seed for item in first if (item.task_name, item.attempt) == ("y", 0))
    assert episode_seed(0, "task", 0) == 1147772574
    assert all(0 <= episode_seed(seed, "t", 0) < 2**31 for seed in range(100))


def test_episode_id_is_a_file_name() -> None:
    [item] = plan_episodes(["../we ird/näme" + "x" * 200], attempts=1, seed=0)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", item.episode_id)


EXCHANGE = Exchange(serialize_llm_request(REQUEST), LLMResponse.from_text("a"))


class Fails(Responses):
    """Fails so often, and then answers."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        if self.left:
            self.left -= 1
            raise PolicyError("down")
        return await super().__call__(request)


async def test_waiting_try_is_owed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    retry = RetryRules(policy_error=1, base_sec=80_000, max_wait_sec=80_000)
    made = experiment(tmp_path, count=1, policy=Fails(1), retry=retry, run_dir=run_dir)
    running = asyncio.create_task(execute(made, tmp_path))
    waits = functools.partial(wait_until, lambda: [log.retry for log in logged_episodes(run_dir.responses)] == [1])
    assert await asyncio.to_thread(waits)
    made.interrupt()
    await running
    assert [(row["outcome"], row["retry"]) for row in rows(tmp_path)] == [("policy_error", 0)]
    earlier = load_previous_sessions(run_dir)
    assert len(earlier.results) == 1, "it never started"
    [owed] = earlier.owed(plan_episodes(["task-0"], attempts=1, seed=0), run_seed=0)
    assert (owed.retry, owed.seed, owed.earlier) == (1, episode_seed(0, "task-0", 0, 1), None)
    assert [log.episode_id for log in logged_episodes(run_dir.responses)] == [owed.episode_id]


async def test_retry_without_an_earlier_row_is_owed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with run_dir.owned():
        pass
    log_in(run_dir.responses, LoggedEpisode("first", "task-0", 0, 0, 7, 12.0)).start([EXCHANGE])
    log_in(run_dir.responses, LoggedEpisode("second", "task-0", 0, 1, 8, 0.0)).start([])
    earlier = load_previous_sessions(run_dir)
    assert [(one.episode_id, one.outcome, one.num_steps) for one in earlier.results] == [("first", "lost", 1)]
    [owed] = earlier.owed(plan_episodes(["task-0"], attempts=1, seed=0), run_seed=0)
    assert owed.earlier is not None
    assert (owed.earlier.episode_id, owed.retry, owed.seed) == ("first", 1, 7)
    assert [log.episode_id for log in logged_episodes(run_dir.responses)] == ["first"]


class Looks(MemoryTrajectoryCollector):
    """Looks at the logs when an episode is to be ended."""

    def __init__(self, responses: Path) -> None:
        super().__init__()
        self.responses = responses
        self.seen: list[EpisodeResult | None] = []

    def end_episode(self, *given: Any, **more: Any) -> Any:
        self.seen += [log.result for log in logged_episodes(self.responses)]
        return super().end_episode(*given, **more)


async def test_result_is_logged_before_its_trajectory_ends(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    looks = Looks(run_dir.responses)
    await execute(experiment(tmp_path, count=1, run_dir=run_dir, collectors={"looks": looks}), tmp_path)
    [logged], [row] = looks.seen, rows(tmp_path)
    assert logged is not None
    ended = EpisodeResult.from_dict(row)
    assert replace(ended, finished_at=logged.finished_at, phase_sec=logged.phase_sec) == logged
    assert logged.reward == 1.0
    assert logged_episodes(run_dir.responses) == []


async def test_live_reward_counts_earlier_sessions(tmp_path: Path) -> None:
    made = experiment(tmp_path, count=3)
    names = await made.prepare()
    done, failed, *_ = (
        row(name, outcome, task=name) for name, outcome in zip(names, ("completed", "lost"), strict=False)
    )
    earlier = PreviousSessions((replace(done, reward=0.25), replace(failed, reward=None)))
    summary = await made.run(names, RunInfo(run_dir=tmp_path, name="n", run_id="i"), earlier=earlier)
    await made.close(summary)
    assert made._live.read().reward[0] == summary.mean_reward
    assert len(summary.scored) == 3
