"""The experiment with small environments of the test's own: whatever happens, every episode has its row."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.containers.container import as_container_factory
from ares_exp.environment import EpisodeReport, TimeStep, complete, restart, termination, transition
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.source import as_source
from ares_exp.errors import AgentError, ConfigError, PreflightError, UserError, VerifierError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.policy import EpisodeSpec, Policy, as_policy
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.records.results import Outcome, RunSummary
from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_storage import PROBE_BYTES
from ares_exp.runs.branching import _FirstResponse
from ares_exp.runs.budget import Budget, Limits
from ares_exp.runs.components import Components, Settings, bounded_concurrency
from ares_exp.runs.experiment import GC_THRESHOLD, Experiment, collecting_seldom
from ares_exp.trackers.tracker import NullTracker, RunInfo
from ares_exp.trajectories.collector import as_collector
from ares_exp.trajectories.collectors import JsonTrajectoryCollector, MemoryTrajectoryCollector
from ares_exp.trajectories.exports.atif_writer import to_atif
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import load
from ares_exp.wrappers.async_gym import drive_async_gym
from ares_exp.wrappers.sync_gym import drive_sync_gym

REQUEST = LLMRequest([{"role": "user", "content": "?"}])


class OneStep:
    """One request, then reward 1. `trouble` may fail in `step` or `close`."""

    def __init__(self, name: str, trouble: Callable[[str], Any]) -> None:
        self.current_task = SimpleNamespace(name=name)
        self.trouble = trouble

    async def reset(self) -> TimeStep[Any]:
        await self.trouble("reset")
        return restart(REQUEST)

    async def step(self, action: Any) -> TimeStep[Any]:
        await self.trouble("step")
        return termination(1.0)

    async def close(self) -> None:
        await self.trouble("close")

    async def __aenter__(self) -> OneStep:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def no_trouble(where: str) -> None:
    await asyncio.sleep(0)


class Source:
    path = None
    own_models: Sequence[OwnModel] = ()

    def __init__(self, count: int, trouble: Callable[[str], Any]) -> None:
        self.count, self.trouble = count, trouble

    def load(self, report: object) -> list[str]:
        return [f"task-{number}" for number in range(self.count)]

    def check(self, parts: object, *, report: object) -> None: ...

    def make(self, task_name: str, parts: object) -> OneStep:
        return OneStep(task_name, self.trouble)


class Ready:
    """A container factory and an agent factory that nothing is asked of."""

    name = "none"

    async def preflight(self) -> None: ...


class Responses(Policy):
    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("a")


def experiment(
    tmp_path: Path, *, count: int = 3, concurrency: int = 1, trouble: Any = no_trouble, **parts: Any
) -> Experiment:
    run_dir = parts.pop("run_dir", None) or RunDir(tmp_path / "run")
    limits, policy_timeout_sec = parts.pop("limits", EpisodeLimits()), parts.pop("policy_timeout_sec", 60)
    with run_dir.owned():
        pass
    components: dict[str, Any] = {
        "source": Source(count, trouble),
        "agent_factory": Ready(),
        "container_factory": Ready(),
        "policy": Responses(),
        "wrapper": complete,
        "collectors": {"json": JsonTrajectoryCollector(tmp_path / "trajectories")},
        "tracker": NullTracker(),
        **parts,
    }
    chosen = Settings(attempts=1, concurrency=concurrency, seed=0, limits=limits, policy_timeout_sec=policy_timeout_sec)
    entered = {
        "source": as_source(components.pop("source")),
        "agent_factory": as_agent_factory(components.pop("agent_factory")),
        "container_factory": as_container_factory(components.pop("container_factory")),
        "collectors": {name: as_collector(one) for name, one in components.pop("collectors").items()},
    }
    return Experiment(Components(**components, **entered), chosen, run_dir)


async def execute(made: Experiment, tmp_path: Path) -> RunSummary:
    names = await made.prepare()
    summary = await made.run(names, RunInfo(run_dir=tmp_path, name="n", run_id="i"))
    await made.close(summary)
    return summary


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]


class Endless(OneStep):
    """Goes on for ever."""

    async def step(self, action: Any) -> TimeStep[Any]:
        await self.trouble("step")
        return transition(REQUEST)


@pytest.mark.parametrize(
    ("limits", "name", "steps", "wrapper"),
    [
        (EpisodeLimits(steps=2), "steps", 2, complete),
        (EpisodeLimits(tokens=30), "tokens", 3, drive_async_gym),
        (EpisodeLimits(cost=0.25), "cost", 1, drive_sync_gym),
        (EpisodeLimits(time=TimeLimits(agent_timeout_sec=0.2)), "time", None, complete),
        (EpisodeLimits(time=TimeLimits(agent_timeout_sec=0.2)), "time", None, drive_sync_gym),
    ],
)
async def test_limits_apply_to_an_environment_without_limits(
    tmp_path: Path, limits: EpisodeLimits, name: str, steps: int | None, wrapper: Any
) -> None:
    class Endlessly(Source):
        def make(self, task_name: str, parts: object) -> OneStep:
            return Endless(task_name, self.trouble)

    class Dear(Policy):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            await asyncio.sleep(0.01)
            return LLMResponse.from_text("a", usage=Usage(8, 2), cost=0.25)

    source = Endlessly(2, no_trouble)
    made = experiment(tmp_path, source=source, policy=Dear(), limits=limits, wrapper=wrapper, concurrency=2)
    assert not (await execute(made, tmp_path)).complete, "nothing was scored"
    for row in rows(tmp_path):
        assert (row["outcome"], row["reward"]) == ("truncated", None)
        assert row["error"] == {"type": "limit", "message": f"limit reached: {name}", "limit": name}
        episode = EpisodeTrajectory.load(tmp_path / "trajectories" / f"{row['episode_id']}.json")
        assert (episode.outcome, episode.limit, episode.total_reward) == ("truncated", name, None)
        assert episode.task_name == row["task_name"]
        assert episode.steps[-1].observation is not None
        assert steps in (None, row["num_steps"])


async def test_unrecorded_tasks_are_left_out(tmp_path: Path) -> None:
    class Recorded(Responses):
        recorded_tasks = ("task-1", "task-9")

    class Keeping(Source):
        kept: Any = None

        def keep(self, task_names: list[str]) -> None:
            self.kept = task_names

    source = Keeping(3, no_trouble)
    made = experiment(tmp_path, source=source, policy=Recorded())
    assert await made.prepare() == source.kept == ["task-1"]
    assert made.warnings == ["Tasks are left out, because they have no recorded episode: task-0, task-2."]
    with pytest.raises(ConfigError, match=r"None of the recorded tasks \(task-1, task-9\) .* has task-0\."):
        await experiment(tmp_path / "other", count=1, policy=Recorded()).prepare()


async def test_oracle_without_solutions_is_rejected(tmp_path: Path) -> None:
    class Solutions(Source):
        needs_container = False

    with pytest.raises(
        ConfigError, match=r"policy=oracle.* needs tasks with solutions, but Solutions has no solutions"
    ):
        await experiment(tmp_path, source=Solutions(2, no_trouble), policy=OraclePolicy()).prepare()
    source = Solutions(2, no_trouble)
    source.has_solutions = True  # type: ignore[attr-defined]
    summary = await execute(experiment(tmp_path / "solved", source=source, policy=OraclePolicy()), tmp_path)
    assert (summary.must_pass, summary.broken) == (True, ())


@pytest.mark.parametrize(
    ("limits", "budget", "warned"),
    [
        (EpisodeLimits(), Budget(), True),
        (EpisodeLimits(cost=1.0), Budget(), False),
        (EpisodeLimits(tokens=1), Budget(), False),
        (EpisodeLimits(), Budget(cost=1.0), False),
        (EpisodeLimits(), Budget(sweep=Limits(tokens=1)), False),
    ],
)
async def test_known_prices_suggest_a_cost_limit(
    tmp_path: Path, limits: EpisodeLimits, budget: Budget, warned: bool
) -> None:
    class Priced(Responses):
        knows_prices = True

    made = experiment(tmp_path, policy=Priced(), limits=limits, budget=budget)
    await made.prepare()
    assert ["`limits.cost=0.5`" in one for one in made.warnings] == [True] * warned
    free = experiment(tmp_path / "free")
    await free.prepare()
    assert free.warnings == []


async def test_unreadable_tasks_are_a_config_error(tmp_path: Path) -> None:
    class Closed(Source):
        def load(self, report: object) -> list[str]:
            raise PermissionError(13, "Permission denied", "tasks")

    with pytest.raises(ConfigError, match=r"Cannot read the tasks: tasks: Permission denied\."):
        await experiment(tmp_path, source=Closed(1, no_trouble)).prepare()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError("mine"), "cancelled"),
        (SystemExit(3), "policy_error"),
        (ValueError("\ud83d"), "policy_error"),
        (TimeoutError(), "policy_error"),
    ],
)
async def test_policy_error_fails_only_its_episode(tmp_path: Path, error: BaseException, outcome: str) -> None:
    class FailsOnce(Responses):
        calls = 0

        async def __call__(self, request: LLMRequest) -> LLMResponse:
            self.calls += 1
            if self.calls == 1:
                raise error
            return await super().__call__(request)

    summary = await execute(experiment(tmp_path, policy=FailsOnce()), tmp_path)
    assert [row["outcome"] for row in rows(tmp_path)] == [outcome, "completed", "completed"]
    assert not summary.complete


@pytest.mark.parametrize("fails", [False, True])
async def test_container_backend_is_closed(tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Holding(Ready):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            if fails:
                raise OSError("no engine")

    factory = Holding()
    summary = await execute(experiment(tmp_path, container_factory=factory), tmp_path)
    assert factory.closed == 1
    assert len(summary.results) == 3
    assert ("The container backend could not be closed: OSError: no engine" in caplog.text) is fails


async def test_reward_survives_a_failed_close(tmp_path: Path) -> None:
    async def fails_in_close(where: str) -> None:
        if where == "close":
            raise RuntimeError("cannot close")

    summary = await execute(experiment(tmp_path, trouble=fails_in_close), tmp_path)
    assert [(row["outcome"], row["reward"]) for row in rows(tmp_path)] == [("completed", 1.0)] * 3
    assert summary.complete


class FailingTracker(NullTracker):
    def start(self, run: object) -> None:
        raise RuntimeError("no")

    def log_episode(self, result: object) -> None:
        raise RuntimeError("no")

    def finish(self, summary: object) -> None:
        raise RuntimeError("no")


async def test_failing_tracker_only_increases_the_count(tmp_path: Path) -> None:
    summary = await execute(experiment(tmp_path, tracker=FailingTracker()), tmp_path)
    assert [row["reward"] for row in rows(tmp_path)] == [1.0] * 3
    assert summary.recording_failures == 4
    assert summary.complete


class FailingRows(RunDir):
    """A run directory in which no row can be written, except for the last call."""

    def __init__(self, path: Path, *errors: OSError) -> None:
        super().__init__(path)
        self.errors = list(errors)

    def append_episodes(self, *rows: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        super().append_episodes(*rows)


async def test_unwritten_row_ends_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_only = [OSError(30, "Read-only file system")] * 9
    made = experiment(tmp_path, count=6, run_dir=FailingRows(tmp_path / "run", *read_only))
    summary = await execute(made, tmp_path)
    assert [result.outcome for result in summary.results] == [Outcome.CANCELLED]
    assert [result.error and result.error.type for result in summary.results] == ["StorageError"]
    assert (summary.unwritten_rows, summary.recording_failures, summary.exit_code) == (1, 0, 1)
    assert rows(tmp_path) == []
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == summary.ended_by
    assert f"cannot write {tmp_path}/run/episodes.jsonl: Read-only file system. Make it writable" in warning
    assert f"`ares-exp resume={tmp_path}/run`" in warning


async def test_reserve_takes_row_of_full_disk(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    summary = await execute(experiment(tmp_path, count=6, run_dir=FailingRows(tmp_path / "run", full)), tmp_path)
    assert rows(tmp_path)[0]["outcome"] == "completed"
    assert len(rows(tmp_path)) < 6
    assert (summary.unwritten_rows, summary.exit_code) == (0, 1)
    assert "No space left on device. Free some disk space" in str(summary.ended_by)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the writes of the reserve and the probe fail."""
    urandom = os.urandom

    def full(size: int) -> bytes:
        if size >= PROBE_BYTES:
            raise OSError(28, "No space left on device")
        return urandom(size)

    monkeypatch.setattr("ares_exp.records.run_storage.os.urandom", full)


class LosingCollector(MemoryTrajectoryCollector):
    """A collector that cannot keep an episode because of an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def end_episode(self, **how: Any) -> Any:
        raise self.error


async def test_lost_trajectory_ends_run_and_is_due(tmp_path: Path) -> None:
    collectors = {"json": LosingCollector(OSError(122, "Disk quota exceeded"))}
    summary = await execute(experiment(tmp_path, count=6, collectors=collectors), tmp_path)
    assert {row["outcome"] for row in rows(tmp_path)} == {"cancelled"}
    assert {row["reward"] for row in rows(tmp_path)} == {None}
    assert len(rows(tmp_path)) < 6
    assert "Disk quota exceeded" in str(summary.ended_by)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), FileNotFoundError(2, "No such file", "elsewhere")], ids=str)
async def test_bug_in_collector_ends_no_run(tmp_path: Path, error: Exception) -> None:
    summary = await execute(experiment(tmp_path, collectors={"json": LosingCollector(error)}), tmp_path)
    assert [row["outcome"] for row in rows(tmp_path)] == ["completed"] * 3
    assert (summary.ended_by, summary.recording_failures) == (None, 3)


class FailingTrainer:
    """A trainer that cannot write its record."""

    def check(self, policy: object, task_names: object) -> None: ...

    async def train(self, run: object) -> None:
        raise RuntimeError("no checkpoint") from OSError(28, "No space left on device", "training.jsonl")


async def test_unwritten_training_record_ends_run(tmp_path: Path) -> None:
    summary = await execute(experiment(tmp_path, trainer=FailingTrainer()), tmp_path)
    assert "cannot write training.jsonl: No space left on device" in str(summary.ended_by)
    assert summary.exit_code == 1


async def test_failure_on_full_disk_leaves_episode_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trouble(where: str) -> None:
        if where == "step":
            fill_disk(monkeypatch)
            raise RuntimeError("the verifier could not write a file")

    summary = await execute(experiment(tmp_path, count=6, trouble=trouble), tmp_path)
    assert [row["outcome"] for row in rows(tmp_path)] == ["cancelled"]
    assert summary.ended_by is not None


async def test_run_without_space_for_reserve_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(ConfigError, match=r"Cannot reserve 1\.1 MiB of free disk space in .*: No space"):
        await execute(experiment(tmp_path), tmp_path)
    assert rows(tmp_path) == []


async def test_deleted_run_directory_stops_judge_requests(tmp_path: Path) -> None:
    class Judge(Responses):
        asked = 0

        async def __call__(self, request: LLMRequest) -> LLMResponse:
            self.asked += 1
            return await super().__call__(request)

    async def trouble(where: str) -> None:
        if where != "step":
            return
        await model.call(judge, request)
        shutil.rmtree(tmp_path / "run")
        await model.call(judge, request)

    judge, request = Judge(), LLMRequest(messages=[{"role": "user", "content": "Is it solved?"}])
    model = OwnModel(judge, name="The judge", key="env.judge", error=VerifierError)
    source = Source(6, trouble)
    source.own_models = [model]
    summary = await execute(experiment(tmp_path, source=source), tmp_path)
    assert judge.asked == 1
    assert f"its directory {tmp_path}/run was deleted" in str(summary.ended_by)


async def test_interrupt_is_bounded_and_records_every_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.runs.scheduler.INTERRUPT_GRACE_SEC", 0.3)
    waiting = asyncio.Semaphore(0)

    async def unwinds_slowly(where: str) -> None:
        if where != "step":
            return
        waiting.release()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
            raise

    made = experiment(tmp_path, count=5, concurrency=3, trouble=unwinds_slowly)
    running = asyncio.create_task(execute(made, tmp_path))
    for _ in range(3):
        await waiting.acquire()
    started = time.monotonic()
    made.interrupt()
    summary = await running
    assert time.monotonic() - started < 25  # unwinding takes 30 s
    assert summary.interrupted
    assert [result.outcome.value for result in summary.results] == ["cancelled"] * 3
    assert [row["outcome"] for row in rows(tmp_path)] == ["cancelled"] * 3


async def test_interrupt_at_any_moment_ends_cleanly(tmp_path: Path) -> None:
    for moment in range(0, 40, 2):  # some fall between the end of an episode and the writing of its row
        folder = tmp_path / str(moment)
        made = experiment(folder, count=12, concurrency=12)
        running = asyncio.create_task(execute(made, folder))
        await asyncio.sleep(0.001 * moment)
        made.interrupt()
        summary = await running
        assert len(summary.results) == len(rows(folder))


class OneAtATime:
    def begin_episode(self, *, task_name: str) -> None: ...
    def record_step(self, record: object) -> None: ...
    def end_episode(self, *, truncated: bool = False) -> Any: ...


async def test_collector_without_handles_needs_concurrency_1(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="concurrency=1"):
        await experiment(tmp_path, collectors={"mine": OneAtATime()}, concurrency=2).prepare()
    made = experiment(tmp_path / "alone", collectors={"mine": OneAtATime()}, concurrency=1)
    assert (await execute(made, tmp_path)).complete


async def test_all_failing_preflights_are_named(tmp_path: Path) -> None:
    class NotReady(Ready):
        async def preflight(self) -> None:
            raise PreflightError("no engine")

    class NoKey(Responses):
        async def preflight(self) -> None:
            raise PreflightError("no key")

    with pytest.raises(UserError, match=r"(?s)no key.*no engine"):
        await experiment(tmp_path, container_factory=NotReady(), policy=NoKey()).prepare()


class Misnamed(OneStep):
    """Reports another name than its source has for the task."""

    def report(self) -> EpisodeReport:
        return EpisodeReport(task_name=type(self).__name__)


class MisnamedSource(Source):
    def make(self, task_name: str, parts: object) -> OneStep:
        return Misnamed(task_name, self.trouble)


async def plain(request: LLMRequest) -> LLMResponse:
    return LLMResponse.from_text("a")


class NamedModel(Responses):
    model_name = "small-1"


class Careful(Ready):
    name = "Careful"


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize(
    ("policy", "known"), [(plain, ("plain", None)), (NamedModel(), ("NamedModel", "small-1"))], ids=["plain", "named"]
)
async def test_trajectory_records_agent_and_model(
    tmp_path: Path, policy: Any, known: tuple[str, str | None], failing: bool
) -> None:
    async def trouble(where: str) -> None:
        if failing and where == "reset":
            raise AgentError("no")

    source = MisnamedSource(2, trouble)
    await execute(experiment(tmp_path, source=source, policy=as_policy(policy), agent_factory=Careful()), tmp_path)
    for row in rows(tmp_path):
        episode = EpisodeTrajectory.load(tmp_path / "trajectories" / f"{row['episode_id']}.json")
        assert episode.task_name == row["task_name"]
        assert (episode.metadata["policy"], episode.metadata.get("model")) == known
        assert episode.metadata["agent"] == "Careful"
        assert to_atif(episode)[0]["agent"].get("model_name") == known[1]


class Slow(OneStep):
    """Takes two steps, has a limit on time, and ends when there is no response."""

    time_left_sec = 0.01

    def grant_time(self, seconds: float) -> None: ...

    async def reset(self) -> TimeStep[Any]:
        self.left = 2
        return await super().reset()

    async def step(self, action: Any) -> TimeStep[Any]:
        self.left -= 1
        last = await super().step(action)
        return last if action is None or not self.left else transition(REQUEST)


class SlowSource(Source):
    def make(self, task_name: str, parts: object) -> OneStep:
        return Slow(task_name, self.trouble)


@pytest.mark.parametrize("ends", ["completed", "without a response", "raising", "not reset"])
async def test_row_and_trajectory_agree_on_steps_and_time(tmp_path: Path, ends: str) -> None:
    steps = 0

    async def trouble(where: str) -> None:
        nonlocal steps
        steps += where == "step"
        if ends == "not reset" or (ends == "raising" and steps == 2):
            raise AgentError("no")

    class ResponsesOnce(Responses):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            if ends == "without a response" and steps:
                await asyncio.Event().wait()
            return await super().__call__(request)

    await execute(experiment(tmp_path, source=SlowSource(1, trouble), policy=ResponsesOnce()), tmp_path)
    [row], [stored] = rows(tmp_path), load(tmp_path / "trajectories")
    assert row["num_steps"] == stored.step_count == stored.load().step_count == steps == (ends != "not reset") * 2
    assert (row["started_at"], row["finished_at"]) == (stored.start_time, stored.end_time)


class Unpriced(Responses):
    def __init__(self) -> None:
        self.unpriced: list[str] = []

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.unpriced = ["small-1"]
        return LLMResponse.from_text("a", usage=Usage(8, 2), finish_reason="length")


@pytest.mark.parametrize("cost", [None, 5.0])
async def test_unknown_price_warns_only_under_cost_limits(tmp_path: Path, cost: float | None) -> None:
    made = experiment(tmp_path, policy=Unpriced(), limits=EpisodeLimits(cost=cost))
    await execute(made, tmp_path)
    assert [warning[:43] for warning in made.warnings] == ["No price is known for model 'small-1': its "] * bool(cost)
    assert [row["length_stops"] for row in rows(tmp_path)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("given", "inside"), [((700, 10, 10), GC_THRESHOLD), ((90_000, 10, 10), 90_000), ((0, 9, 9), 0)]
)
def test_garbage_is_collected_less_often_inside(given: tuple[int, int, int], inside: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(*given)
        with suppress(KeyError), collecting_seldom():
            assert gc.get_threshold() == (inside, *given[1:])
            raise KeyError
        assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("most", "needs_container", "asked", "allowed"),
    [(None, True, 4, 4), (1, True, 1, 1), (1, True, 4, 1), (1, False, 4, 4)],
)
def test_concurrency_is_bounded_by_the_backend(
    most: int | None, needs_container: bool, asked: int, allowed: int
) -> None:
    parts: Any = SimpleNamespace(
        container_factory=SimpleNamespace(name="host", max_containers=most),
        source=SimpleNamespace(needs_container=needs_container),
    )
    warnings: list[str] = []
    assert bounded_concurrency(parts, asked, warnings.append) == allowed
    assert len(warnings) == (allowed != asked)
    assert all("container=host supports at most concurrency=1" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("limits", "raised", "warning"),
    [
        ((1024, 4096), None, ""),
        ((64, 4096), (96, 4096), ""),
        ((64, -1), (96, -1), ""),
        ((64, 64), (64, 64), "`ulimit -n 96`, or set concurrency=1."),
    ],
)
def test_open_files_are_allowed_or_named(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None, warning: str
) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: changed.append(new))
    parts: Any = SimpleNamespace(
        container_factory=SimpleNamespace(max_containers=None), source=SimpleNamespace(needs_container=True)
    )
    warnings: list[str] = []
    bounded_concurrency(parts, 4, warnings.append)
    assert changed == ([] if raised is None else [raised])
    assert "".join(warnings).endswith(warning)
    assert len(warnings) == bool(warning)


HI = LLMRequest([{"role": "user", "content": "hi"}])


def branch(*replies: str) -> Any:
    return _FirstResponse("given", ScriptedPolicy(replies=list(replies)).for_episode(EpisodeSpec("t")))


async def test_resumed_branch_skips_recorded_responses() -> None:
    client = branch("a", "b")
    client.advance(HI, LLMResponse.from_text("given"))
    assert (await client(HI)).text == "a"
    client = branch("a", "b")
    for text in ("given", "a"):
        client.advance(HI, LLMResponse.from_text(text))
    assert (await client(HI)).text == "b"


async def test_policy_without_position_is_not_advanced() -> None:
    client: Any = _FirstResponse("given", OraclePolicy())
    client.advance(HI, LLMResponse.from_text("given"))
    client.advance(HI, LLMResponse.from_text("x"))
    assert "solve.sh" in (await client(HI)).text
