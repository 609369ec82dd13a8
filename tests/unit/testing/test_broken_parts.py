"""Each suite finds what is wrong with a part: every one of its tests fails on a part that is broken for it."""

import asyncio
import copy
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.activity import Activity
from ares_exp.containers.container import ContainerFactoryBase, ExecResult
from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.environment import EpisodeReport, PastStep, PendingRequest, restart, termination, transition, truncation
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts, SourceBase
from ares_exp.errors import DivergenceError, EpisodeStateError, UserError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.testing.agent_contract import AgentContract
from ares_exp.testing.changes_contract import ChangesContract
from ares_exp.testing.collector_contract import CollectorContract
from ares_exp.testing.container_contract import ContainerContract
from ares_exp.testing.echo_container import RehearsalContainer
from ares_exp.testing.environment_contract import EnvironmentContract
from ares_exp.testing.policy_contract import PolicyContract
from ares_exp.testing.source_contract import SourceContract
from ares_exp.testing.tracker_contract import TrackerContract
from ares_exp.trackers.tracker import RunInfo, SeveralTrackers, TrackerBase
from ares_exp.trajectories.collector import EpisodeCollector, as_collector
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from tests.agents import careless_agents as careless

FAILURES = (
    AssertionError,
    NotImplementedError,
    AttributeError,
    TypeError,
    ValueError,
    UserError,
    pytest.fail.Exception,
)


def case(test: str, broken: type) -> Any:
    return pytest.param(test, broken, id=f"{broken.__name__}-{test.removeprefix('test_')}")


def changed(base: type, name: str, /, **members: Any) -> type:
    """A part like `base`, but for a few members."""
    return type(name, (base,), members)


def turned(base: type, name: str, method: str, turn: Callable[[Any], Any]) -> type:
    """A part like `base`, which turns what one of its methods gives into something else."""

    async def give(self: Any, *given: Any, **named: Any) -> Any:
        return turn(await getattr(super(made, self), method)(*given, **named))

    made = type(name, (base,), {method: give})
    return made


class Room:
    export_state = step_count = None

    async def reset(self) -> Any:
        return restart(LLMRequest([{"role": "user", "content": "?"}]))

    async def close(self) -> None: ...


class Rooms(SourceBase):
    path = None
    names: Iterable[str] = ("a", "b")

    def load(self, report: Any) -> Any:
        self.loaded = list(self.names)
        return list(self.loaded)

    def check(self, parts: Any, *, report: Any) -> None: ...

    def make(self, task_name: str, parts: Any) -> Any:
        return Room()


class NoMake:
    path = None

    def load(self, report: Any) -> Any:
        return ["a"]


class Refuses(Rooms):
    def check(self, parts: Any, *, report: Any) -> None:
        raise UserError("Not with me.")


class ClosesOnce(Rooms):
    def __init__(self) -> None:
        self.open = 1

    async def close(self) -> None:
        self.open -= 1
        assert self.open >= 0

    def make(self, task_name: str, parts: Any) -> Any:
        return ClosesOnce()


class StartsInTheMiddle(Rooms):
    def make(self, task_name: str, parts: Any) -> Any:
        class Late(Room):
            async def reset(self) -> Any:
                return restart(None)

        return Late()


NUMBERS, ROOM = itertools.count(), Room()
OtherEachTime = changed(Rooms, "OtherEachTime", load=lambda *_: [f"a{next(NUMBERS)}"])
OneRoom = changed(Rooms, "OneRoom", make=lambda *_: ROOM)
ForgetfulDigest = changed(Rooms, "ForgetfulDigest", digest=lambda *_: f"sha256:{next(NUMBERS)}")
TwiceTheSame = changed(Rooms, "TwiceTheSame", names=("a", "a"))
Promises = changed(Rooms, "Promises", exports_state=True, make=lambda *_: object())
OtherTasks = changed(Rooms, "OtherTasks", tasks=[SimpleNamespace(name="c")])
KeepsAll = changed(Rooms, "KeepsAll", tasks=[SimpleNamespace(name="a"), SimpleNamespace(name="b")])

SOURCES = [
    case("test_required_members_exist", NoMake),
    case("test_task_names_are_unique", TwiceTheSame),
    case("test_reload_gives_the_same_tasks", OtherEachTime),
    case("test_tasks_pass_their_checks", Refuses),
    case("test_each_episode_has_a_separate_environment", OneRoom),
    case("test_environment_without_reset_can_be_closed", ClosesOnce),
    case("test_episode_starts", StartsInTheMiddle),
    case("test_digest_is_stable", ForgetfulDigest),
    case("test_tasks_and_origins_match_the_names", OtherTasks),
    case("test_dropped_tasks_are_omitted", KeepsAll),
    case("test_declared_abilities_match_the_environment", Promises),
    case("test_close_is_idempotent", ClosesOnce),
]


class Nothing(ContainerFactoryBase):
    name = "nothing"

    def check(self, spec: Any) -> list[str]:
        return []


def of_source(made: Any) -> dict[str, Any]:
    parts = EpisodeParts(Nothing(), ShellAgentFactory(), EpisodeLimits(), seed=0)  # type: ignore[abstract]
    return {"source": made, "loaded": made, "names": list(made.load(print)), "parts": parts}


@pytest.mark.parametrize(("test", "broken"), SOURCES)
def test_broken_source_is_found(test: str, broken: type) -> None:
    if broken is not NoMake:
        run(SourceContract, test, of_source(Rooms()))
    with pytest.raises(FAILURES):
        run(SourceContract, test, of_source(broken()))


class Whole:
    """An environment that is as it should be, with every capability: two requests, then reward 1."""

    time_left_sec: float | None = None
    activity = None

    def __init__(self) -> None:
        self.step_count, self.current_task, self.time_step = 0, None, None
        self.past_steps: Any = ()
        self.truncated_by: str | None = None

    def ask(self) -> LLMRequest:
        return LLMRequest([{"role": "user", "content": f"{self.current_task} {self.step_count}"}])

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            raise UserError("There are no options.")
        self.step_count, self.current_task, self.truncated_by = 0, f"task {seed}", None
        return self.show(restart(self.ask()), None)

    async def step(self, action: Any) -> Any:
        if self.time_step is None or self.time_step.last():
            raise EpisodeStateError("Call reset() first.")
        self.step_count += 1
        if action is None:
            return await self.truncate("time")
        return self.show(transition(self.ask()) if self.step_count < 3 else termination(1.0), action)

    async def close(self) -> None:
        self.time_step = None

    async def truncate(self, limit: Any) -> Any:
        self.truncated_by = limit
        return self.show(truncation(0.5), None)

    def show(self, step: Any, action: Any) -> Any:
        before = () if step.first() else self.past_steps
        self.past_steps = (*before, PastStep(step, action, 0.0, None, 0.0, Activity()))
        self.time_step = step
        return step

    def grant_time(self, seconds: float) -> None: ...

    def report(self) -> Any:
        return EpisodeReport(task_name=self.current_task, truncated_by=self.truncated_by)

    def pending_requests(self) -> Any:
        waits = self.time_step is not None and not self.time_step.last()
        return (PendingRequest(0, "main", self.time_step.observation),) if waits else ()

    async def changed_requests(self, known: Any) -> Any:
        if known:
            await asyncio.Event().wait()
        return self.pending_requests()

    async def export_state(self, output_dir: Any, *, snapshot_id: str | None = None) -> Any:
        if self.time_step is None:
            raise EpisodeStateError("Call reset() first.")
        (output_dir / str(snapshot_id)).mkdir(parents=True)
        (output_dir / str(snapshot_id) / "snapshot.json").touch()
        return SimpleNamespace(snapshot_id=snapshot_id, step_count=self.step_count)

    async def fork(self, n: int, *, diversify: bool = False) -> Any:
        return [copy.copy(self) for _ in range(n)]


class FirstIsMid(Whole):
    async def reset(self, **given: Any) -> Any:
        await super().reset(**given)
        return self.show(transition(self.ask()), None)


class NeverAnew(Whole):
    async def reset(self, **given: Any) -> Any:
        return self.time_step or await super().reset(**given)


class StepsAlways(Whole):
    async def step(self, action: Any) -> Any:
        if self.time_step is None or self.time_step.last():
            await self.reset()
        return await super().step(action)


class ClosedForever(Whole):
    closed = False

    async def close(self) -> None:
        self.closed = True

    async def reset(self, **given: Any) -> Any:
        assert not self.closed
        return await super().reset(**given)


class LeavesTask(Whole):
    async def reset(self, **given: Any) -> Any:
        self.task = asyncio.create_task(asyncio.sleep(60))
        return await super().reset(**given)


class WithoutPorts(Whole):
    async def __aenter__(self) -> Any:
        raise RuntimeError("no forwarded port")

    async def __aexit__(self, *_: object) -> None: ...


class CountsFromOne(Whole):
    async def reset(self, **given: Any) -> Any:
        first = await super().reset(**given)
        self.step_count = 1
        return first


class NotTruncated(Whole):
    async def truncate(self, limit: Any) -> Any:
        return self.show(termination(1.0), None)


class WrongPast(Whole):
    def show(self, step: Any, action: Any) -> Any:
        super().show(step, action)
        self.past_steps = self.past_steps[:1]
        return step


class NoFile(Whole):
    async def export_state(self, output_dir: Any, *, snapshot_id: str | None = None) -> Any:
        if self.time_step is None:
            raise EpisodeStateError("Call reset() first.")
        return SimpleNamespace(snapshot_id=snapshot_id, step_count=self.step_count)


class LastFirst(Whole):
    """The newest of its requests comes first."""

    def pending_requests(self) -> Any:
        if not super().pending_requests():
            return ()
        others = [PendingRequest(number, "main", "another") for number in (7, 8)]
        return (*super().pending_requests(), *(others if self.step_count == 0 else reversed(others)))


class AlwaysChanged(Whole):
    async def changed_requests(self, known: Any) -> Any:
        return self.pending_requests()


Unseeded = changed(Whole, "Unseeded", reset=lambda self, **given: Whole.reset(self, seed=next(NUMBERS)))
AnyOption = changed(Whole, "AnyOption", reset=lambda self, seed=None, options=None: Whole.reset(self, seed=seed))
NotRecorded = turned(Whole, "NotRecorded", "step", lambda step: SimpleNamespace(**step._asdict(), last=lambda: True))
OtherRequest = changed(
    Whole, "OtherRequest", pending_requests=lambda self: (PendingRequest(0, "main", None),) if self.time_step else ()
)
NoDiscount = turned(Whole, "NoDiscount", "step", lambda step: step._replace(discount=0.5))
InfiniteReward = turned(Whole, "InfiniteReward", "step", lambda step: step._replace(reward=step.reward and math.inf))
KeepsTime = changed(Whole, "KeepsTime", time_left_sec=100.0)
NoLimitNamed = changed(Whole, "NoLimitNamed", report=lambda _: EpisodeReport(truncated_by="steps"))

ENVIRONMENTS = [
    case("test_episode_starts_with_first", FirstIsMid),
    case("test_episode_steps_are_valid", NoDiscount),
    case("test_episode_steps_are_valid", InfiniteReward),
    case("test_reset_mid_episode_starts_another", NeverAnew),
    case("test_reset_after_the_end_starts_another", NeverAnew),
    case("test_step_before_the_first_reset_is_refused", StepsAlways),
    case("test_step_after_the_end_is_refused", StepsAlways),
    case("test_close_works_at_any_time", ClosedForever),
    case("test_close_ends_all_tasks", LeavesTask),
    case("test_context_manager_works", WithoutPorts),
    case("test_same_seed_gives_the_same_task", Unseeded),
    case("test_unknown_options_are_refused", AnyOption),
    case("test_episodes_are_recorded", NotRecorded),
    case("test_report_follows_the_episode", NoLimitNamed),
    case("test_inspection_follows_the_episode", CountsFromOne),
    case("test_time_limit_can_be_extended", KeepsTime),
    case("test_truncate_ends_the_episode", NotTruncated),
    case("test_past_steps_are_available", WrongPast),
    case("test_state_can_be_exported_and_forked", NoFile),
    case("test_pending_requests_are_ordered", OtherRequest),
    case("test_pending_requests_are_ordered", LastFirst),
    case("test_changed_requests_are_announced", AlwaysChanged),
]


@pytest.mark.parametrize(("test", "broken"), ENVIRONMENTS)
def test_broken_environment_is_found(test: str, broken: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.testing.environment_contract.GRACE_SEC", 0.2)
    run(EnvironmentContract, test, {"environment": Whole(), "tmp_path": tmp_path / "good"})
    with pytest.raises((*FAILURES, RuntimeError, TimeoutError)):
        run(EnvironmentContract, test, {"environment": broken(), "tmp_path": tmp_path / "broken"})


class Talker(Policy):
    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("fine")


class Scribbles(Policy):
    async def __call__(self, request: LLMRequest) -> LLMResponse:
        object.__setattr__(request, "temperature", 0.5)
        return LLMResponse.from_text("fine")


class OneEpisode(Talker):
    busy = False

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return LLMResponse.from_text("fine")


class Counts(Policy):
    """Its clients count what they answer, and forget to when somebody else does."""

    def for_episode(self, episode: EpisodeSpec) -> Any:
        class Client:
            count = 0

            async def __call__(self, request: LLMRequest) -> LLMResponse:
                self.count += 1
                return LLMResponse.from_text(str(self.count))

            def advance(self, request: LLMRequest, response: Any) -> None: ...

        return Client()


class LateVersion(Talker):
    """Its responses bear the version that was before."""

    policy_version: str | None = None
    before: str | None = None

    async def update(self, version: str, weights: Any = None) -> None:
        self.before, self.policy_version = self.policy_version, version

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("fine", policy_version=self.before)


class ClosedOnce(Talker):
    closed = 0

    async def close(self) -> None:
        self.closed += 1
        assert self.closed == 1


SaysText = turned(Talker, "SaysText", "__call__", lambda response: "fine")
Pays = turned(Talker, "Pays", "__call__", lambda response: LLMResponse.from_text("fine", cost=-1.0))
SaysThatItMay = changed(OneEpisode, "SaysThatItMay", max_concurrency_per_episode=4)
Undecided = changed(Talker, "Undecided", needs_solution=None)
BadSeed = changed(Talker, "BadSeed", seed_of=lambda *_: -1)
Speechless = changed(Talker, "Speechless", report=lambda *_: object())

POLICIES = [
    case("test_policy_returns_a_response", SaysText),
    case("test_policy_returns_a_response", Pays),
    case("test_request_is_unchanged", Scribbles),
    case("test_concurrent_episodes_get_responses", OneEpisode),
    case("test_concurrent_requests_get_responses", SaysThatItMay),
    case("test_advancing_client_skips_responses", Counts),
    case("test_needs_solution_is_a_bool", Undecided),
    case("test_episode_seed_is_valid", BadSeed),
    case("test_report_is_json_and_renders", Speechless),
    case("test_updated_policy_reports_its_version", LateVersion),
    case("test_close_is_idempotent", ClosedOnce),
]


@pytest.mark.parametrize(("test", "broken"), POLICIES)
def test_broken_policy_is_found(test: str, broken: type) -> None:
    given = {"question": LLMRequest([{"role": "user", "content": "?"}])}
    if broken is not Counts:
        run(PolicyContract, test, {"policy": Talker(), **given}, may_skip=True)
    with pytest.raises(FAILURES):
        run(PolicyContract, test, {"policy": broken(), **given})


class NoEnd:
    def begin_episode(self, *, task_name: str) -> None: ...
    def record_step(self, record: Any) -> None: ...


class LosesSteps(MemoryTrajectoryCollector):
    def record_step(self, record: Any, *, episode: Any = None) -> None:
        if record.step_type != "MID":
            super().record_step(record, episode=episode)


class NeverTruncated(MemoryTrajectoryCollector):
    def end_episode(self, *, truncated: bool = False, **more: Any) -> Any:
        return super().end_episode(**more)


class ZeroReward(MemoryTrajectoryCollector):
    def end_episode(self, **given: Any) -> Any:
        from dataclasses import replace

        found = super().end_episode(**given)
        return replace(found, total_reward=found.total_reward or 0.0)


class OneId(MemoryTrajectoryCollector):
    def begin_episode(self, **given: Any) -> Any:
        return super().begin_episode(**{**given, "episode_id": "e"})


class Silent(MemoryTrajectoryCollector):
    def _resolve(self, episode: Any) -> Any:
        try:
            return super()._resolve(episode)
        except RuntimeError:
            return self.begin_episode(task_name="?")


class OwnId(MemoryTrajectoryCollector):
    def begin_episode(self, *, task_name: str, **given: Any) -> Any:
        return super().begin_episode(task_name=task_name)


class LastOpened(MemoryTrajectoryCollector):
    def _resolve(self, episode: Any) -> Any:
        return next(reversed(self._open.values()))


class ClosedForGood(EpisodeCollector):
    open = True

    def close(self) -> None:
        assert self.open
        self.open = False


COLLECTORS = [
    case("test_required_members_exist", NoEnd),
    case("test_episode_has_its_steps", LosesSteps),
    case("test_truncation_is_recorded", NeverTruncated),
    case("test_missing_reward_is_none", ZeroReward),
    case("test_consecutive_episodes_are_recorded", OneId),
    case("test_step_without_an_episode_is_refused", Silent),
    case("test_end_without_an_episode_is_refused", Silent),
    case("test_step_after_the_end_is_refused", Silent),
    case("test_episode_metadata_is_recorded", OwnId),
    case("test_concurrent_episodes_are_separate", LastOpened),
    case("test_concurrent_episodes_need_a_handle", LastOpened),
    case("test_close_is_idempotent", ClosedForGood),
]


@pytest.mark.parametrize(("test", "broken"), COLLECTORS)
def test_broken_collector_is_found(test: str, broken: type) -> None:
    good = MemoryTrajectoryCollector()
    run(CollectorContract, test, {"collector": good, "complete": good})
    made = broken()
    with pytest.raises(FAILURES):
        run(CollectorContract, test, {"collector": made, "complete": made if broken is NoEnd else as_collector(made)})


class Notes(TrackerBase):
    def start(self, run: RunInfo) -> None: ...
    def log_episode(self, result: Any, trajectory: Any = None) -> None: ...
    def finish(self, summary: Any) -> None: ...


class NoFinish:
    def start(self, run: RunInfo) -> None: ...
    def log_episode(self, result: Any) -> None: ...


class FailsOnRows(Notes):
    def log_episode(self, result: Any, trajectory: Any = None) -> None:
        raise OSError("no")


class NeedsEpisodes(Notes):
    def finish(self, summary: Any) -> None:
        assert summary.results


class OnlyNew(Notes):
    def start(self, run: RunInfo) -> None:
        assert not run.resumed


Slow = changed(Notes, "Slow", log_system=lambda *_: time.sleep(0.01))
OnlyFinite = changed(Notes, "OnlyFinite", log_episode=lambda _, result, *more: int(result.reward or 0))
Writes = changed(Notes, "Writes", start=lambda _, run: (run.run_dir / "notes").write_text(""))

TRACKERS = [
    case("test_required_members_exist", NoFinish),
    case("test_run_is_recorded", FailsOnRows),
    case("test_only_finish_may_be_slow", Slow),
    case("test_run_without_episodes_is_recorded", NeedsEpisodes),
    case("test_resumed_run_is_recorded", OnlyNew),
    case("test_infinite_numbers_are_accepted", OnlyFinite),
    case("test_unwritable_run_directory_is_tolerated", Writes),
]


@pytest.mark.parametrize(("test", "broken"), TRACKERS)
def test_broken_tracker_is_found(test: str, broken: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.testing.tracker_contract.AT_ONCE_SEC", 0.5)

    def execute(tracker: Any, run_dir: Path) -> None:
        run_dir.mkdir()
        watched = SeveralTrackers({"tracker": tracker})
        run(TrackerContract, test, {"tracker": tracker, "watched": watched, "run_info": RunInfo(run_dir, "n", "i")})
        assert watched.failures == 0

    execute(Notes(), tmp_path / "good")
    with pytest.raises((*FAILURES, OSError)):
        execute(broken(), tmp_path / "broken")


class NotReady(ShellAgentFactory):
    async def preflight(self) -> None:
        raise UserError("no")


class OneAgent(ShellAgentFactory):
    def __call__(self, **given: Any) -> Any:
        self.made = vars(self).get("made") or super().__call__(**given)
        return self.made


class PathOptions(ShellAgentFactory):
    options: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"templates_dir": Path("/")}  # type: ignore[misc]


class OtherOptions(ShellAgentFactory):
    options: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"command_timeout_sec": 5.0 + len(options)}


TakesContext = changed(ShellAgentFactory, "TakesContext", supports=frozenset({"messages", "mind_reading"}))
Nameless = changed(ShellAgentFactory, "Nameless", name="")

AGENTS = [
    case("test_preflight_passes", NotReady),
    case("test_each_episode_has_a_separate_agent", OneAgent),
    case("test_agent_runs_and_replays", careless.Now),
    case("test_supported_context_is_accepted", TakesContext),
    case("test_options_recreate_the_factory", PathOptions),
    case("test_options_recreate_the_factory", OtherOptions),
    case("test_factory_has_a_name", Nameless),
]


@pytest.mark.parametrize(("test", "broken"), AGENTS)
def test_broken_agent_is_found(test: str, broken: type) -> None:
    def given(factory: Any) -> dict[str, Any]:
        return {"factory": factory, "container": RehearsalContainer(lambda command: command.removeprefix("echo "))}

    run(AgentContract, test, given(ShellAgentFactory()))
    with pytest.raises((*FAILURES, DivergenceError)):
        run(AgentContract, test, given(broken if broken is careless.Now else broken()))


class Mute:
    """A box that runs nothing, and says that it did."""

    image = None

    async def exec(self, command: str, **options: Any) -> ExecResult:
        return ExecResult("", 0, 0.0)

    async def capture_changes(self, objects: Any) -> Delta:
        return Delta("base", {"/a": Entry("file", mode=0o644)})


@pytest.mark.parametrize(
    ("suite", "test"),
    [
        (ContainerContract, "test_command_has_a_result"),
        (ContainerContract, "test_commands_share_files_but_not_shell_state"),
        (ContainerContract, "test_stdin_is_empty"),
        (ContainerContract, "test_command_runs_as_the_user"),
        (ContainerContract, "test_unknown_user_is_refused"),
        (ContainerContract, "test_unusual_directory_names_are_supported"),
        (ChangesContract, "test_new_container_has_no_changes"),
    ],
)
async def test_broken_container_is_found(suite: type, test: str) -> None:
    with pytest.raises(FAILURES):
        await call(suite, test, {"box": Mute(), "objects": None})


def call(suite: type, test: str, fixtures: dict[str, Any]) -> Any:
    method: Callable[..., object] = vars(suite)[test]
    _, *names = inspect.signature(method).parameters
    return method(suite(), **{name: fixtures[name] for name in names})


def run(suite: type, test: str, fixtures: dict[str, Any], *, may_skip: bool = False) -> None:
    try:
        call(suite, test, fixtures)
    except pytest.skip.Exception:
        assert may_skip, "the suite left the test out"


@pytest.mark.parametrize(
    ("suite", "cases"),
    [
        (SourceContract, SOURCES),
        (EnvironmentContract, ENVIRONMENTS),
        (PolicyContract, POLICIES),
        (CollectorContract, COLLECTORS),
        (TrackerContract, TRACKERS),
        (AgentContract, AGENTS),
    ],
)
def test_every_test_of_a_suite_is_covered(suite: type, cases: list[Any]) -> None:
    assert {name for name in vars(suite) if name.startswith("test_")} == {one.values[0] for one in cases}
