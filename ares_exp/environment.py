"""The interface of environments: `Environment`, time steps as in dm_env, and optional members.

Every object with the coroutines `reset`, `step` and `close` can be used as an environment.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, Self, runtime_checkable

from typing_extensions import TypeVar  # `typing.TypeVar` supports defaults only from Python 3.13

from ares_exp.config.parts import StandIn, has_members
from ares_exp.containers.activity import Activity
from ares_exp.containers.container import Container
from ares_exp.errors import EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.request import MessageEdit
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
"""Maximum number of characters of an observation in the `repr` of a time step."""


class TimeStep(NamedTuple, Generic[ObservationT, RewardT, DiscountT]):
    """The result of `reset()` or `step()`. Type parameters: observation, reward and discount.

    Attributes:
        step_type: `"FIRST"` from `reset()`, `"MID"` while the episode is running, `"LAST"` when it has ended.
        reward: `None` on FIRST; on MID 0.0, unless the task has intermediate rewards; on LAST the episode's reward. On
            LAST, `None` means that the verifier did not run (`verify_on_truncation=false`).
        discount: `None` on FIRST; 1.0 on MID; on LAST, 0.0 for termination and 1.0 for truncation.
        observation: The pending LLM request; `None` on LAST.
    """

    step_type: StepType
    reward: RewardT | None
    discount: DiscountT | None
    observation: ObservationT | None

    def __repr__(self) -> str:
        """Formats the time step. A long observation is shortened in the middle."""
        shown = repr(self.observation)
        if len(shown) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            shown = f"{shown[:half]} … {shown[-half:]}"
        return f"TimeStep({self.step_type!r}, reward={self.reward!r}, discount={self.discount!r}, observation={shown})"

    def first(self) -> bool:
        """Whether this step starts an episode."""
        return self.step_type == "FIRST"

    def mid(self) -> bool:
        """Whether the episode continues after this step."""
        return self.step_type == "MID"

    def last(self) -> bool:
        """Whether this step ends an episode."""
        return self.step_type == "LAST"


def restart(observation: T) -> TimeStep[T]:
    """Creates the FIRST step of an episode."""
    return TimeStep("FIRST", None, None, observation)


def transition(observation: T, reward: float = 0.0) -> TimeStep[T]:
    """Creates a MID step of an episode that continues."""
    return TimeStep("MID", reward, 1.0, observation)


def termination(reward: float) -> TimeStep[Any]:
    """Creates the LAST step of an episode that ended by itself, and not at a limit."""
    return TimeStep("LAST", reward, 0.0, None)


def truncation(reward: float | None) -> TimeStep[Any]:
    """Creates the LAST step of an episode that a limit ended."""
    return TimeStep("LAST", reward, 1.0, None)


def check_action(action: object, *, may_be_none: bool = False) -> None:
    """Raises `TypeError` if the action passed to `step()` is not an `LLMResponse`. `may_be_none` also allows `None`.

    Call it first, so that an invalid action has no effect.
    """
    if not isinstance(action, LLMResponse) and not (may_be_none and action is None):
        raise TypeError(
            f"Expected step() to receive an LLMResponse, got {type(action).__name__}. To create one from a text, use "
            "LLMResponse.from_text(text)."
        )


LimitName = Literal["steps", "time", "tokens", "cost", "format_errors", "agent_exit", "context"]
"""The name of a limit that can truncate an episode.

`steps`, `tokens` and `cost` are limits that the config key `limits` sets, and `time` is any of the time limits.
`format_errors` is the agent's limit on replies in a wrong format. `agent_exit` means that an installed agent exited
with an error. Its work so far is still scored. `context` means that a request is longer than the model's context."""


@runtime_checkable
class MinimalEnvironment(Protocol):
    """The three methods that every environment must have. `EnvironmentBase` adds optional members.

    An observation is an LLM request, and an action is an LLM response. If the agent, the container or the verifier
    fails, `reset()` and `step()` raise an exception. They return a LAST step only if the episode ended by itself or at
    a limit.

    `reset()` may also accept `seed` (for the choice of tasks) and `options`, such as `{"task": name_or_index}`.
    """

    async def reset(self) -> TimeStep[Any, Any, Any]:
        """Starts an episode and returns its FIRST step. If an episode is running, abandons it."""
        ...

    async def step(self, action: Any) -> TimeStep[Any, Any, Any]:
        """Passes the response `action` to the agent, which sent the pending request, and returns the next time step.

        `None` means that the policy returned no response within the time limit. Only environments with their own time
        limit (`is_timed`) receive `None`. They then truncate the episode, or the current stage of the task. For other
        environments, the runner enforces the time limit, and ends the episode without calling `step`.
        """
        ...

    async def close(self) -> None:
        """Releases all resources of the environment. May be called at any time, and more than once."""
        ...


@runtime_checkable
class Environment(MinimalEnvironment, Protocol[ActionT, ObservationT, RewardT, DiscountT]):
    """An environment that is also an asynchronous context manager, like all environments of this package.

    Type parameters: action, observation, reward and discount. The last two can be omitted if they are floats, as in
    `Environment[LLMResponse, LLMRequest]`.
    """

    async def reset(self) -> TimeStep[ObservationT, RewardT, DiscountT]:
        """Starts an episode and returns its FIRST step. If an episode is running, abandons it."""
        ...

    async def step(self, action: ActionT) -> TimeStep[ObservationT, RewardT, DiscountT]:
        """Passes the response `action` to the agent and returns the next time step; see `MinimalEnvironment.step`."""
        ...

    async def __aenter__(self) -> Environment[ActionT, ObservationT, RewardT, DiscountT]:
        """Returns the environment itself."""
        ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment. The exception, if any, determines the outcome of a running episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """Facts about the running episode or, if none is running, the last one. The run records them.

    Attributes:
        task_name: Name of the task; `None` if the environment has no tasks, or before the first `reset()`.
        agent: Name of the code agent, as recorded; `None` if there is no code agent.
        agent_facts: Facts about an installed code agent and its requests; `None` for other agents.
        seed: Seed of the episode; `None` if the environment does not know it.
        attempt: Number of the attempt at the task, from 0; `None` if the environment does not count attempts.
        truncated_by: The limit that ended the episode: a `LimitName`, or a name that only this environment uses. `None`
            if no limit was reached, or while the episode is running.
        limit_note: Sentence with details about the limit in `truncated_by`; `None` if there are no details.
        format_errors: Number of replies in a format that the agents could not use; 0 if the agents do not count them.
        rewards: Rewards of the verifier, by key, and of the scorers, by name; may be empty.
        note: Reason why the tests could not be run or graded, or why an episode that reached a limit has no reward.
        stages: Results of the finished stages; empty for a single-stage task.
        phase: Phase of the running `reset()` or `step()`: `start`, `agent`, `verify`, `score`, or a name that only this
            environment uses. `None` while the environment waits for an action.
        phase_sec: Wall-clock seconds so far, by phase.
        has_container: Whether the episode has a container that is running or starting.
        container_image: Image or other source of the container's files; `None` if unknown, or if there is no container.
        environment_usage: Tokens and cost of the environment's own model calls; `None` if it makes no such calls.
        lineage: For a branched episode, the ids of its root and parent episode, and the branch step; otherwise empty.
        edits: Changes that a branch makes to the agent's messages before the policy receives them.
        snapshots: Names of the episode's snapshots that are kept, oldest first.
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
    """An earlier time step of the running episode, and the action that led to it.

    Attributes:
        time_step: Time step that `reset()` or `step()` returned.
        action: Response to the previous step; `None` on FIRST, and if the policy did not respond in time.
        timestamp: Time of the step in epoch seconds.
        policy_sec: Seconds that the policy needed for this response; `None` on FIRST.
        environment_sec: Duration of `reset()` or `step()` in seconds.
        activity: The agent's work during the call, such as its commands.
    """

    time_step: TimeStep[Any]
    action: LLMResponse | None
    timestamp: float
    policy_sec: float | None
    environment_sec: float
    activity: Activity


class PendingRequest(NamedTuple):
    """A request from the agent that has no response yet.

    Attributes:
        call_id: Number of the request, unique within its stage of the episode.
        conversation: Name of the conversation to which the request belongs.
        request: Request in the form in which the policy receives it.
    """

    call_id: int
    conversation: str
    request: Any


MAIN_CONVERSATION = "main"
"""Name of the agent's main conversation. If an agent does not distinguish conversations, all requests belong to it."""
BACKGROUND_PREFIX = "side-"
"""Prefix of the names of conversations without tools, which are usually background requests."""


class EnvironmentBase:
    """Base class with all members of an environment. The optional members have defaults, and most of these do nothing.

    Your environment can inherit from this class, or only define some of its members. `complete` then adds the others.
    Only `reset`, `step` and `close` are required.
    """

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode and returns its FIRST step. If an episode is running, abandons it.

        Args:
            seed: Seed for choosing tasks.
            options: `{"task": name_or_index}` selects the task.
        """
        raise NotImplementedError

    async def step(self, action: Any) -> TimeStep[Any]:
        """Passes the response `action` to the agent and returns the next time step; see `MinimalEnvironment.step`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Releases all resources of the environment. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def unwrapped(self) -> MinimalEnvironment:
        """The innermost environment, without wrappers."""
        return self

    # Facts about the episode

    def report(self) -> EpisodeReport:
        """Returns facts about the running or last episode, even during `step()`. Default: only the name of its task."""
        return EpisodeReport(task_name=_name_of(self.current_task))

    @property
    def num_stages(self) -> int:
        """Number of finished stages of the task. Default: the number of stages in the report."""
        return len(self.report().stages)

    @property
    def step_count(self) -> int:
        """Number of time steps of the episode since FIRST; 0 before the first `reset()`. Default: 0."""
        return 0

    @property
    def current_task(self) -> Any:
        """The task of the episode, or the task's name; `None` before the first `reset()`. Default: `None`."""
        return None

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The last result of `reset()` or `step()`; `None` before `reset()` and after an exception. Default: `None`."""
        return None

    @property
    def activity(self) -> Activity | None:
        """The agent's work during the last `reset()` or `step()`, such as its commands; `None` without a container."""
        return None

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of the running episode, ending with the pending step.

        After a snapshot was restored, they include the steps before the snapshot. Empty by default, or if the steps are
        unknown.
        """
        return ()

    # Limits

    @property
    def is_timed(self) -> bool:
        """Whether the environment has its own time limit (`time_left_sec`). Only then may `step(None)` be called."""
        return type(self).time_left_sec is not EnvironmentBase.time_left_sec

    @property
    def time_left_sec(self) -> float | None:
        """Seconds left of the environment's time limit for the agent, which includes the response times of the policy.

        If the policy does not respond within this time, the caller must call `step(None)`. `None` by default, and if
        there is no limit or no running episode.
        """
        return None

    def grant_time(self, seconds: float) -> None:
        """Extends the environment's time limit by `seconds`, to make up for time in which no work was possible.

        Examples are the time for taking a snapshot, or an outage of the endpoint.
        """

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends and scores an episode that waits for an action, because the previous step reached `limit`.

        Returns:
            The LAST time step, with discount 1.0 and the verifier's reward. `None` (the default) if the environment
            cannot end the episode, which then continues.

        Raises:
            ContainerError, VerifierError: See `step`.
        """
        return None

    def keeps(self, limits: object) -> bool:
        """Returns whether the environment enforces these `EpisodeLimits`. If not (default), a wrapper enforces them."""
        return False

    # Snapshots

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> EnvironmentSnapshot:
        """Saves the state of the episode as a snapshot, atomically. The episode continues unchanged.

        Args:
            output_dir: Directory of the snapshot store, which is created if missing.
            snapshot_id: Name of the snapshot and of its folder in the store; generated by default.

        Raises:
            SnapshotError: The environment cannot be exported. The subclass of the error identifies the cause.
            OSError: The snapshot could not be written.
        """
        raise self._cannot_be_captured

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[Environment]:
        """Creates `n` independent copies of the environment, which continue from the current state.

        Args:
            n: Number of environments.
            diversify: Whether the agents of the copies get different random values from now on.

        Raises:
            SnapshotError, ContainerError: A fork failed. No fork is left running.
        """
        raise self._cannot_be_captured

    @property
    def _cannot_be_captured(self) -> SnapshotUnsupportedError:
        kind = type(self.unwrapped).__name__
        return SnapshotUnsupportedError(f"{kind} has no `export_state` and no `fork`, so its episodes cannot be saved.")

    # Several requests at once

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the requests without a response. The first one is the observation, to which `step(action)` responds.

        An agent that runs several conversations can have more than one such request. The policy can then work on them
        at the same time. New requests are appended, and the order never changes. During `step()`, the request to which
        the step responds is not included. Empty if no episode is running.
        """
        return ()

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until `pending_requests()` differs from `known`, and then returns the pending requests.

        May be awaited at any time, also during `step()`, and may be cancelled. It may ignore changes that the caller of
        `step()` knows about: the request to which the action responds, and the request that `step()` returns. By
        default, never returns.
        """
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the event is never set")

    # The container, for scorers

    def hold_container(self) -> None:
        """Makes the environment keep each container after LAST, so that scorers can use it.

        The container is kept until `release_container()`, `reset()` or `close()`.
        """

    @property
    def held_container(self) -> Container | None:
        """The container that was kept after LAST (see `hold_container`); `None` if there is no such container."""
        return None

    async def release_container(self) -> None:
        """Removes the container that was kept after LAST, if any. `time_step` remains available. Idempotent."""


class EnvironmentWrapper(EnvironmentBase):
    """Base class of wrappers. Members that a subclass does not override are forwarded to the wrapped environment."""

    def __init__(self, env: MinimalEnvironment) -> None:
        """Wraps `env`. Closing the wrapper closes `env`."""
        self._env = complete(env)

    async def __aenter__(self) -> Self:
        await self._env.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Passes the exception to the wrapped environment's `__aexit__`, which closes the environment."""
        await self._env.__aexit__(exc_type, exc, traceback)


def _forwarded(name: str, member: Any) -> Any:
    """Creates a property or method for `EnvironmentWrapper` that accesses this member of the wrapped environment."""
    if not callable(member):
        return property(lambda self: getattr(self._env, name))

    @functools.wraps(member)
    def call(self: EnvironmentWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._env, name)(*args, **kwargs)

    return call


for _name, _member in vars(EnvironmentBase).items():
    if not _name.startswith("_") and _name not in vars(EnvironmentWrapper):
        setattr(EnvironmentWrapper, _name, _forwarded(_name, _member))
del _name, _member


def complete(env: MinimalEnvironment) -> EnvironmentBase:
    """Returns `env` if it has all members of `EnvironmentBase`, and otherwise a wrapper that adds the missing ones.

    The `reset` of the wrapper accepts `seed` and `options`. If the `reset` of `env` does not accept a seed, the seed is
    ignored, and this is logged once. If the `reset` of `env` does not accept options, non-empty options raise
    `TypeError`.
    """
    kind: Any = type(env)
    return env if isinstance(env, EnvironmentBase) and _takes_both(kind) else _Completed(env)


class _Completed(StandIn, EnvironmentBase):
    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("_") or name in ("reset", "unwrapped", "is_timed") or not own("_has")(name):
            return own(name)
        return getattr(own("_part"), name)

    def _has(self, name: str) -> bool:
        """Returns whether the environment defines a member. A method that is set to `None` counts as missing."""
        value = getattr(self._part, name, _ABSENT)
        if value is _ABSENT:  # a property that raised AttributeError is not absent
            return inspect.getattr_static(self._part, name, _ABSENT) is not _ABSENT
        return value is not None or not callable(getattr(EnvironmentBase, name, None))

    @property
    def unwrapped(self) -> MinimalEnvironment:
        env: MinimalEnvironment = self._part
        return env

    @property
    def is_timed(self) -> bool:
        part: Any = self._part
        return part.is_timed if isinstance(part, EnvironmentBase) else self._has("time_left_sec")

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        env, given = self._part, dict[str, Any]()
        if seed is not None:
            if takes_seed(env):
                given["seed"] = seed
            else:
                kind: Any = type(env)
                _warn_of_unused_seed(kind)
        if options:
            if not _takes(env.reset, "options"):
                raise TypeError(
                    f"{type(env).__name__}.reset() does not accept options, but got {dict(options)!r:.200}. Call "
                    "reset() without options, or add the keyword argument `options=None` to the environment's "
                    "reset()."
                )
            given["options"] = options
        time_step: TimeStep[Any] = await env.reset(**given)
        return time_step

    async def __aenter__(self) -> Self:
        if isinstance(self._part, AbstractAsyncContextManager):
            await self._part.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._part, AbstractAsyncContextManager):
            await self._part.__aexit__(exc_type, exc, traceback)
        else:
            await self._part.close()


_ABSENT = object()


class _Named(Protocol):
    name: str


def _name_of(task: object) -> str | None:
    """Returns the name of a task, which is an object with a `name`, or the name itself; `None` for other objects."""
    name = task.name if has_members(task, _Named) else task
    return name if isinstance(name, str) else None


def takes_seed(env: MinimalEnvironment) -> bool:
    """Returns whether the environment's `reset()` accepts the argument `seed`."""
    return _takes(env.reset, "seed")


@functools.cache
def _takes_both(kind: Any) -> bool:
    return _takes(kind.reset, "seed") and _takes(kind.reset, "options")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@functools.cache
def _warn_of_unused_seed(kind: Any) -> None:
    logger.warning(
        "%s.reset() has no argument `seed`, so the seed is ignored. Add the keyword argument "
        "`seed=None` if reset() makes random choices.",
        kind.__name__,
    )


class OneCallAtATime:
    """A guard that rejects a call to an environment while another call is running.

    Attributes:
        in_progress: Name of the running call; empty if no call is running.
    """

    def __init__(self) -> None:
        self.in_progress = ""

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Context for the call `what`, such as `"step()"`. Raises `EpisodeStateError` if another call is running."""
        if self.in_progress:
            raise EpisodeStateError(f"{what} was called while {self.in_progress} is running. Await that call first.")
        self.in_progress = what
        try:
            yield
        finally:
            self.in_progress = ""


def no_episode(*, ended: bool) -> EpisodeStateError:
    """Creates the error for a `step()` without a running episode. `ended` is whether there was an earlier episode."""
    state = "has ended its episode" if ended else "has not been reset"
    return EpisodeStateError(f"step() was called on an environment that {state}. Call reset() first.")
