"""The contract of environments: time steps as in dm_env, `Environment`, and the optional capabilities.

Anything with `reset`, `step` and `close` is an environment.
"""

# mypy: disable-error-code="type-abstract"
# Protocols are passed as values of `type[T]`, which mypy refuses for abstract types.

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    runtime_checkable,
)

from typing_extensions import TypeVar  # that of `typing` has defaults from Python 3.13 on

from ares_exp.config.parts import has_members
from ares_exp.containers.activity import Activity
from ares_exp.containers.container import Container
from ares_exp.errors import EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.message_edit import MessageEdit
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import AgentFacts, EnvironmentUsage, StageResult

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

logger = logging.getLogger(__name__)

StepType = Literal["FIRST", "MID", "LAST"]
ActionT = TypeVar("ActionT", contravariant=True, default=Any)
ObservationT = TypeVar("ObservationT", covariant=True, default=Any)
RewardT = TypeVar("RewardT", covariant=True, default=float)
DiscountT = TypeVar("DiscountT", covariant=True, default=float)
T = TypeVar("T")


_SHOWN_CHARS = 200
"""Length of an observation in the repr of a time step."""


class TimeStep(NamedTuple, Generic[ObservationT, RewardT, DiscountT]):
    """One time step; in signatures `TimeStep[LLMRequest]`, or with the types of reward and discount after it.

    Attributes:
        step_type: `"FIRST"` from `reset()`, `"MID"` while the episode is running, `"LAST"` when it has ended.
        reward: `None` on FIRST; 0.0 on MID unless the task gives one; the episode's reward on LAST.
            `None` on LAST only when the verifier did not run (`verify_on_truncation=false`).
        discount: `None` on FIRST; 1.0 on MID; on LAST 0.0 for termination and 1.0 for truncation.
        observation: The pending LLM request; `None` on LAST.
    """

    step_type: StepType
    reward: RewardT | None
    discount: DiscountT | None
    observation: ObservationT | None

    def __repr__(self) -> str:
        """Shows all but the middle of a long observation."""
        shown = repr(self.observation)
        if len(shown) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            shown = f"{shown[:half]} … {shown[-half:]}"
        return f"TimeStep({self.step_type!r}, reward={self.reward!r}, discount={self.discount!r}, observation={shown})"

    def first(self) -> bool:
        """Whether this step opens an episode."""
        return self.step_type == "FIRST"

    def mid(self) -> bool:
        """Whether the episode continues after this step."""
        return self.step_type == "MID"

    def last(self) -> bool:
        """Whether this step ends an episode."""
        return self.step_type == "LAST"


def restart(observation: T) -> TimeStep[T]:
    """Makes the FIRST step of an episode."""
    return TimeStep("FIRST", None, None, observation)


def transition(observation: T, reward: float = 0.0) -> TimeStep[T]:
    """Makes a MID step: the episode continues."""
    return TimeStep("MID", reward, 1.0, observation)


def termination(reward: float) -> TimeStep[Any]:
    """Makes the LAST step of an episode that terminated by itself."""
    return TimeStep("LAST", reward, 0.0, None)


def truncation(reward: float | None) -> TimeStep[Any]:
    """Makes the LAST step of an episode that a limit cut short."""
    return TimeStep("LAST", reward, 1.0, None)


def check_action(action: object) -> None:
    """Refuses anything that is not an answer of a policy, before any state changes.

    Raises:
        TypeError: `action` is neither an `LLMResponse` nor `None`.
    """
    if action is not None and not isinstance(action, LLMResponse):
        raise TypeError(
            f"Expected step() to be given an LLMResponse, got {type(action).__name__}. Of a text it is made by "
            "LLMResponse.from_text(text)."
        )


LimitName = Literal["steps", "time", "tokens", "cost", "format_errors", "agent_exit", "order"]
"""A limit on episodes: those of `limits`, and `time` for the time limits. `format_errors` is an agent's own;
`agent_exit` stands for an installed agent that ended as one that failed: what it did is scored all the same;
`order` for somebody who ordered so (`ares-exp ctl RUN cancel … --verify`)."""


@runtime_checkable
class MinimalEnvironment(Protocol):
    """The minimal environment: three methods. Everything in this package works with it; capabilities are optional.

    Observation = LLM request, action = LLM response. `reset()` and `step()` raise when the agent, the container or the
    verifier fails; a LAST step always means that the episode ended by itself or by a limit.

    `reset()` may take the keywords `seed` (for the choice of tasks) and `options` (`{"task": name_or_index}`);
    `reset_environment` calls a `reset()` without them, too.
    """

    async def reset(self) -> TimeStep[Any, Any, Any]:
        """Starts an episode (abandoning one under way) and returns its FIRST step."""
        ...

    async def step(self, action: Any) -> TimeStep[Any, Any, Any]:
        """Applies `action` to the pending observation and returns the next step.

        `None` means that the policy's time was up, so that there is no answer. Only a `Timed` environment is ever
        given `None`; it ends the episode, or the stage of its task, by truncation. For all others the runner keeps
        the time limit itself, and ends the episode without a call of `step`.
        """
        ...

    async def close(self) -> None:
        """Releases everything that the environment holds. May be called at any time, and more than once."""
        ...


@runtime_checkable
class Environment(MinimalEnvironment, Protocol[ActionT, ObservationT, RewardT, DiscountT]):
    """An environment that is also an asynchronous context manager, like all environments of this package.

    In signatures also `Environment[LLMResponse, LLMRequest]`, with the types of reward and discount after them if they
    are not floats.
    """

    async def reset(self) -> TimeStep[ObservationT, RewardT, DiscountT]:
        """Starts an episode (abandoning one under way) and returns its FIRST step."""
        ...

    async def step(self, action: ActionT) -> TimeStep[ObservationT, RewardT, DiscountT]:
        """Applies `action` to the pending observation and returns the next step."""
        ...

    async def __aenter__(self) -> Environment[ActionT, ObservationT, RewardT, DiscountT]:
        """Returns the environment itself."""
        ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment. The exception says how a running episode ended."""
        ...


class ClosedOnExit:
    """A base class: what is entered by `async with` is the object itself, and it is closed when the block is left."""

    async def close(self) -> None:
        """Releases what it holds. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Returns the object itself."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it."""
        await self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """Facts about the running episode, or the last one, for its records.

    Attributes:
        task_name: Name of the task; `None` when the environment has no tasks, or before the first `reset()`.
        agent: Name of its code agent in records; `None` when it has none.
        agent_facts: What came from its code agent, one that is installed; `None` for any other.
        seed: Seed of the episode; `None` when the environment does not know it.
        attempt: Number of the attempt at the task, from 0; `None` when the environment does not count.
        truncated_by: The limit that ended the episode: a `LimitName`, or a name that only this environment uses. `None`
            when no limit did, or while the episode is running.
        limit_note: More about that limit, in a sentence; `None` when there is no more.
        format_errors: Replies that its agents could not use, as far as they count them.
        rewards: Everything that the verifier scored, by key, and every scorer, by name; empty when none did.
        note: Why the reward says nothing about the tests, if they could not be run or graded, or why an episode that
            a limit ended has none.
        stages: Results of the finished stages; empty for a single-stage task.
        phase: What a running call is busy with: `start`, `agent`, `verify`, `score`, or a name that only this
            environment uses.
            `None` while it waits for an action.
        phase_sec: Wall seconds by phase so far.
        has_container: Whether the episode holds a container, started or being started.
        container_image: Source of the container's files; `None` when there is no container, or none yet.
        environment_usage: Tokens and cost of the environment's own model calls in this try; `None` when it makes
            no such calls.
        lineage: Origin of a branched episode: ids of the root and the parent episode, and the step; empty for an
        episode that was not branched.
        edits: Messages that the policy sees in another form than the agent wrote them.
        snapshots: Names of its snapshots that are kept, oldest first.
        snapshot_failures: Number of snapshots that could not be taken or deleted.
    """

    task_name: str | None = None
    agent: str | None = None
    agent_facts: AgentFacts | None = None
    seed: int | None = None
    attempt: int | None = None
    truncated_by: str | None = None
    limit_note: str | None = None
    format_errors: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None
    stages: tuple[StageResult, ...] = ()
    phase: str | None = None
    phase_sec: Mapping[str, float] = field(default_factory=dict)
    has_container: bool = False
    container_image: str | None = None
    environment_usage: EnvironmentUsage | None = None
    lineage: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[MessageEdit, ...] = ()
    snapshots: tuple[str, ...] = ()
    snapshot_failures: int = 0


@dataclass(frozen=True, slots=True)
class PastStep:
    """A past time step of the running episode, and the action that led to it.

    Attributes:
        time_step: As it was returned.
        action: The answer to the previous step; `None` on FIRST, and where there was no answer in time.
        timestamp: Epoch seconds.
        policy_sec: Seconds until that answer; `None` on FIRST.
        environment_sec: Seconds that the environment took.
        activity: What the agent did in the container.
    """

    time_step: TimeStep[Any]
    action: LLMResponse | None
    timestamp: float
    policy_sec: float | None
    environment_sec: float
    activity: Activity


class PendingRequest(NamedTuple):
    """A request of the agent that has no answer yet.

    Attributes:
        call_id: Number of the call, unique within its stage of the episode.
        lane: The conversation that the request belongs to.
        request: The request as the policy will see it.
    """

    call_id: int
    lane: str
    request: Any


MAIN_LANE = "main"
"""The lane of an agent that has one conversation, or does not tell several apart."""


# Optional capabilities. An environment either derives from the capability's class (faster to detect) or just has its
# members. `EnvironmentWrapper` has all of them and passes them on.


@runtime_checkable
class Reporting(Protocol):
    """Reports facts about its episode, for rows, trajectories, trackers and monitoring."""

    def report(self) -> EpisodeReport:
        """Returns facts about the running episode, or the last one. May be called at any time, also during `step()`."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """Exposes its current task and time step. All three members are read-only."""

    @property
    def step_count(self) -> int:
        """Number of time steps of the episode since FIRST; 0 before the first `reset()`."""
        ...

    @property
    def current_task(self) -> Any:
        """The task of the episode, or its name; `None` before the first `reset()`."""
        ...

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The pending time step, or the LAST one; `None` before `reset()` and after a call that raised."""
        ...


@runtime_checkable
class Timed(Protocol):
    """Keeps its own time limit on the agent; the policy's time counts, too."""

    @property
    def time_left_sec(self) -> float | None:
        """Returns the seconds until the limit. An answer that is not there by then is given as `step(None)`.

        `None` without a limit, or without a running episode.
        """
        ...

    def grant_time(self, seconds: float) -> None:
        """Extends the limit by time that neither agent nor policy used: for a snapshot, or a wait for the endpoint."""
        ...


@runtime_checkable
class Truncating(Protocol):
    """Can end its episode on request and have the current state scored."""

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends an episode that waits for an action, because the previous step reached `limit`.

        Returns:
            LAST with discount 1.0 and the verifier's reward; `None` when the episode cannot be ended and continues.

        Raises:
            ContainerError, VerifierError: As from `step`.
        """
        ...


@runtime_checkable
class Recordable(Protocol):
    """Gives a recorder more data about its time steps than the steps hold."""

    @property
    def activity(self) -> Activity | None:
        """The agent's activity in the container during the last `reset()` or `step()`; `None` without a container."""
        ...

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of the running episode, the pending one last, including those before a snapshot.

        Empty when they are not known.
        """
        ...


@runtime_checkable
class Exportable(Protocol):
    """Can be exported and forked while it waits for an action."""

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> EnvironmentSnapshot:
        """Writes `<output_dir>/<snapshot_id>/snapshot.json` atomically. The episode continues unchanged.

        Args:
            output_dir: The snapshot store: a directory, made when missing.
            snapshot_id: Name of the snapshot; generated by default.

        Raises:
            SnapshotError: The environment cannot be exported; the subclass says why.
            OSError: The snapshot could not be written.
        """
        ...

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[Environment]:
        """Makes `n` independent environments that continue from the current state.

        Args:
            n: Number of environments.
            diversify: Whether each agent draws different random values from now on.

        Raises:
            SnapshotError, ContainerError: A fork failed; the subclass says why. No fork is left running.
        """
        ...


@runtime_checkable
class Concurrent(Protocol):
    """Has an agent that may wait for several answers at once."""

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the unanswered requests, in a defined order; `step(action)` answers the first, the observation.

        Lets a caller ask the policy for several answers at once. The order is not changed by what comes later: new
        requests come last. During `step()` those that wait besides the answered one; empty without an episode.
        """
        ...


@runtime_checkable
class Announcing(Protocol):
    """Tells at once when its agent asks for something more, or gives something up. For a `Concurrent` environment."""

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until `pending_requests()` has other calls than `known`, and returns it.

        May be awaited at any time, also during `step()`, and cancelled. Does not return while nothing changes, and need
        not for the request that a `step()` answers or returns: its caller knows of these.
        """
        ...


@runtime_checkable
class Holding(Protocol):
    """Can keep the container of an episode that has ended, for scorers that look into it."""

    def hold_container(self) -> None:
        """Has the container of each episode kept at LAST, until `release_container()`, `reset()` or `close()`."""
        ...

    @property
    def held_container(self) -> Container | None:
        """The container of the episode that reached LAST; `None` before, after its release, and without one."""
        ...

    async def release_container(self) -> None:
        """Removes the kept container. Idempotent; the LAST `time_step` stays readable."""
        ...


class EnvironmentWrapper(
    Reporting, Inspectable, Timed, Truncating, Recordable, Exportable, Concurrent, Announcing, Holding
):
    """Base class of wrappers: passes every call and every capability through to the wrapped environment.

    A capability that the wrapped environment lacks gets a neutral value: an empty report, no time limit, no past steps;
    `export_state` and `fork` raise. The wrapper is an async context manager even if the wrapped environment is not.
    """

    def __init__(self, env: MinimalEnvironment) -> None:
        """Wraps `env`, which the wrapper then owns."""
        self._wrap(env)

    def _wrap(self, env: MinimalEnvironment) -> None:
        """Replaces the wrapped environment with `env`."""
        self._env = env
        self._timed = _capability(env, Timed)
        self._recordable = _capability(env, Recordable)
        self._reporting = _capability(env, Reporting)

    @property
    def environment(self) -> MinimalEnvironment:
        """The wrapped environment."""
        return self._env

    @property
    def unwrapped(self) -> MinimalEnvironment:
        """The innermost environment."""
        return self._env.unwrapped if isinstance(self._env, EnvironmentWrapper) else self._env

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode; see `reset_environment`."""
        return await reset_environment(self._env, seed=seed, options=options)

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next step."""
        return await self._env.step(action)

    async def close(self) -> None:
        """Closes the wrapped environment."""
        await self._env.close()

    async def __aenter__(self) -> Self:
        """Enters the wrapped environment."""
        await enter(self._env)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the wrapped environment and passes the exception on; that closes the environment."""
        await leave(self._env, exc_type, exc, traceback)

    def report(self) -> EpisodeReport:
        """Returns the wrapped environment's report; when it has none, one with the name of its current task alone."""
        if self._reporting is None:
            return EpisodeReport(task_name=_name_of(self.current_task))
        return self._reporting.report()

    @property
    def step_count(self) -> int:
        """The wrapped environment's step count; 0 when it does not count."""
        shown = _capability(self._env, Inspectable)
        return shown.step_count if shown is not None else 0

    @property
    def current_task(self) -> Any:
        """The wrapped environment's task; `None` when it has none."""
        shown = _capability(self._env, Inspectable)
        return shown.current_task if shown is not None else None

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The wrapped environment's time step; `None` when it keeps none."""
        shown = _capability(self._env, Inspectable)
        return shown.time_step if shown is not None else None

    @property
    def is_timed(self) -> bool:
        """Whether the wrapped environment keeps its own time limit; only then is it given `step(None)`."""
        if isinstance(self._env, EnvironmentWrapper):
            return self._env.is_timed
        return self._timed is not None

    @property
    def time_left_sec(self) -> float | None:
        """Returns the seconds until the wrapped environment's time limit; `None` when it has no limit."""
        return self._timed.time_left_sec if self._timed is not None else None

    def grant_time(self, seconds: float) -> None:
        """Extends the wrapped environment's time limit, if it has one."""
        if self._timed is not None:
            self._timed.grant_time(seconds)

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the wrapped environment's episode, if it supports that."""
        truncating = _capability(self._env, Truncating)
        return await truncating.truncate(limit) if truncating is not None else None

    @property
    def activity(self) -> Activity | None:
        """The wrapped environment's activity; `None` when it reports none."""
        return self._recordable.activity if self._recordable is not None else None

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The wrapped environment's past steps; empty when it reports none."""
        return self._recordable.past_steps if self._recordable is not None else ()

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> EnvironmentSnapshot:
        """Exports the wrapped environment. Raises `SnapshotUnsupportedError` when it does not support that."""
        return await self._exportable.export_state(output_dir, snapshot_id=snapshot_id)

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[Environment]:
        """Forks the wrapped environment. Raises `SnapshotUnsupportedError` when it does not support that."""
        return await self._exportable.fork(n, diversify=diversify)

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the wrapped environment's unanswered requests; empty when it reports none."""
        concurrent = _capability(self._env, Concurrent)
        return concurrent.pending_requests() if concurrent is not None else ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits for a change of the wrapped environment's requests; for ever when it announces none."""
        announcing = _capability(self._env, Announcing)
        if announcing is None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable: nobody sets the event")
        return await announcing.changed_requests(known)

    def hold_container(self) -> None:
        """Has the wrapped environment keep its containers at LAST, if it has any."""
        if (holding := _capability(self._env, Holding)) is not None:
            holding.hold_container()

    @property
    def held_container(self) -> Container | None:
        """The container that the wrapped environment keeps; `None` when it keeps none."""
        holding = _capability(self._env, Holding)
        return holding.held_container if holding is not None else None

    async def release_container(self) -> None:
        """Removes the container that the wrapped environment keeps, if it does."""
        if (holding := _capability(self._env, Holding)) is not None:
            await holding.release_container()

    @property
    def _exportable(self) -> Exportable:
        exportable = _capability(self._env, Exportable)
        if exportable is None:
            raise SnapshotUnsupportedError(
                f"{type(self.unwrapped).__name__} has no `export_state` and `fork`: its episodes cannot be captured."
            )
        return exportable


def _capability(env: MinimalEnvironment, kind: type[T]) -> T | None:
    """Returns `env` typed as the capability `kind`; `None` when it lacks that capability."""
    return env if has_members(env, kind) else None


class _Named(Protocol):
    name: str


def _name_of(task: object) -> str | None:
    """Returns the name of a current task; `None` where it has none."""
    name = task.name if has_members(task, _Named) else task
    return name if isinstance(name, str) else None


async def enter(env: MinimalEnvironment) -> None:
    """Enters `env` as `async with` does; does nothing for an environment without `__aenter__`."""
    if isinstance(env, AbstractAsyncContextManager):
        await env.__aenter__()


async def leave(
    env: MinimalEnvironment,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Leaves `env` as `async with` does; closes an environment without `__aexit__`."""
    if isinstance(env, AbstractAsyncContextManager):
        await env.__aexit__(exc_type, exc, traceback)
    else:
        await env.close()


async def reset_environment(
    env: MinimalEnvironment, *, seed: int | None = None, options: Mapping[str, Any] | None = None
) -> TimeStep[Any]:
    """Resets `env`, passing only the keywords that its `reset()` takes.

    Args:
        env: The environment.
        seed: Seeds the choice of tasks. If `reset()` takes no `seed`, it is called without; that is logged once.
        options: Further options. An empty mapping is not passed on.

    Raises:
        TypeError: There are `options`, and `reset()` takes none.
    """
    if seed is None and not options:
        return await env.reset()
    given: dict[str, Any] = {}
    if seed is not None:
        if takes_seed(env):
            given["seed"] = seed
        else:
            _say_that_it_takes_no_seed(type(env))
    if options:
        if not _takes(env.reset, "options"):
            raise TypeError(
                f"Expected an environment that can be reset with options, but {type(env).__name__}.reset() does not "
                f"take them, got {dict(options)!r:.200}. Call reset() without, or give the environment's reset() the "
                "keyword argument `options=None`."
            )
        given["options"] = options
    return await env.reset(**given)


def takes_seed(env: MinimalEnvironment) -> bool:
    """Whether the environment's `reset()` takes a seed."""
    return _takes(env.reset, "seed")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@functools.cache
def _say_that_it_takes_no_seed(kind: type[object]) -> None:
    logger.warning(
        "%s.reset() takes no `seed`: it is reset without, so that a seed does not choose its tasks. Give it the "
        "keyword argument `seed=None` if there is something to seed.",
        kind.__name__,
    )


class OneCallAtATime:
    """Refuses a call of an environment while another call is running.

    Attributes:
        under_way: Name of the running call; empty when there is none.
    """

    def __init__(self) -> None:
        self.under_way = ""

    def during(self, what: str) -> Self:
        """Marks `what` as the running call inside the block. Raises `EpisodeStateError` when another one is running."""
        if self.under_way:
            raise EpisodeStateError(f"{what} while {self.under_way} is under way: await that one first.")
        self.under_way = what
        return self

    def __enter__(self) -> None:
        """Begins the block of `during`."""

    def __exit__(self, *exc_info: object) -> None:
        """Ends the running call."""
        self.under_way = ""


def no_episode(*, ended: bool) -> EpisodeStateError:
    """Makes the error for a `step()` without a running episode: it has ended, or was never started."""
    state = "has ended its episode" if ended else "has not been reset"
    return EpisodeStateError(f"step() on an environment that {state}: call reset() first.")
