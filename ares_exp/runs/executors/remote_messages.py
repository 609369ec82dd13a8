"""The messages between a run and its hosts: orders, replies, and errors of any class."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ares_exp.containers.activity import Activity
from ares_exp.environment import EpisodeReport, PastStep, PendingRequest
from ares_exp.runs.executors.executor import Recipe

MAX_DETAIL_CHARS = 20_000
"""Maximum length of the traceback of an error, in characters."""


class ForeignError(Exception):
    """An error from another process that cannot be recreated here. Has the name and message of the original error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A serialized error. Ray changes the classes of errors, and cannot send some of them.

    Attributes:
        name: Name of the error's class.
        pickled: Pickled class, arguments of its `__new__`, `args` and attributes; `None` if they cannot be pickled.
            Attributes that cannot be pickled are omitted.
        message: Message of the error.
        detail: Traceback of the error.
    """

    name: str
    pickled: bytes | None
    message: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Serializes an error."""
        attributes = {name: data for name, value in vars(error).items() if (data := _pickled(value)) is not None}
        attributes.pop("__notes__", None)
        return cls(
            name=type(error).__name__,
            pickled=_pickled((type(error), _arguments_of(error), error.args, attributes)),
            message=_text_of(error),
            detail="".join(traceback.format_exception(error))[-MAX_DETAIL_CHARS:],
        )

    def error(self, host: str) -> BaseException:
        """Recreates the error, with a note about its origin.

        Args:
            host: Name of the host that raised the error.
        """
        made = self._same_class()
        if made is None or _text_of(made) != self.message:
            made = type(self.name, (ForeignError,), {})(self.message)
        made.add_note(f"Raised on {host}:\n{self.detail}")
        return made

    def _same_class(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            kind, arguments, args, attributes = pickle.loads(self.pickled)
            made: BaseException = kind.__new__(kind, *arguments)
            made.args = args
            vars(made).update({name: pickle.loads(data) for name, data in attributes.items()})
        except Exception:  # the import of the class, its constructor and its attributes can raise any exception
            return None
        return made


def _arguments_of(error: BaseException) -> tuple[Any, ...]:
    """Returns the arguments to recreate an error. An `OSError` also needs file names, which are not in `args`."""
    reduced = error.__reduce__() if isinstance(error, OSError) else None
    return reduced[1] if isinstance(reduced, tuple) and reduced[0] is type(error) else error.args


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # `__reduce__` of the object can raise any exception
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__} without a text: {type(failed).__name__}"


class Outcome(NamedTuple):
    """The outcome of a call in another process.

    Attributes:
        value: Return value; `None` if the call failed.
        failure: Error that the call raised; `None` if it succeeded.
    """

    value: Any = None
    failure: Failure | None = None

    @classmethod
    async def of(cls, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Self:
        """Calls a function, and returns the outcome."""
        try:
            return cls(await function(*args, **kwargs))
        except (Exception, SystemExit) as error:
            return cls(None, Failure.of(error))

    def result(self, host: str) -> Any:
        """Returns the value, or raises the error.

        Args:
            host: Name of the host that executed the call.
        """
        if self.failure is not None:
            raise self.failure.error(host)
        return self.value


class News(NamedTuple):
    """News from a host: calls `RemoteHost.on_{method}`. If the message has a number, the host awaits the result."""

    number: int | None
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class HostOrder:
    """The order to prepare a host for a run.

    Attributes:
        recipe: Recipe with which environments are created.
        task_names: Names of the tasks of the run.
        digests: Digest of each task's content; `None` for an unknown digest.
        parts: Parts of any episode, without the factories.
        versions: Versions of the run's software, by name.
        seen_file: Path and content of a file in the run directory, with which the host detects a shared disk. `None`
            skips this check.
    """

    recipe: Recipe
    task_names: tuple[str, ...]
    digests: Mapping[str, str | None]
    parts: Mapping[str, Any]
    versions: Mapping[str, str]
    seen_file: tuple[Path, str] | None = None


class HostReady(NamedTuple):
    """The reply of a host that is ready.

    Attributes:
        pid: Process id of the host.
        warnings: Warnings for the user.
        shares_disk: Whether the host can access the run directory.
    """

    pid: int
    warnings: tuple[str, ...]
    shares_disk: bool


class EnvironmentOrder(NamedTuple):
    """The order with which a host creates an environment.

    Attributes:
        task_name: Name of the task.
        parts: Parts of the episode, without the factories.
        streams: Whether files of the episode are stored in the host until the run fetches them.
        has_background_requests: Whether the run responds to background requests from the agent.
    """

    task_name: str
    parts: Mapping[str, Any]
    streams: bool
    has_background_requests: bool = False


class Facts(NamedTuple):
    """The state of an environment at the end of a call.

    Attributes:
        report: Report of the environment; `None` before the first call. Then the other fields are empty.
        step_type: Type of the current time step; `None` if there is no time step.
        step_count, time_left_sec, activity, pending: Values of the environment's members with these names.
        past: Past steps of a restored or forked episode (only after `reset` and `fork`).
        has_files: Whether files of the episode are on the node and must be fetched.
    """

    report: EpisodeReport | None = None
    step_type: str | None = None
    step_count: int = 0
    time_left_sec: float | None = None
    activity: Activity | None = None
    pending: tuple[PendingRequest, ...] = ()
    past: tuple[PastStep, ...] = ()
    has_files: bool = False
