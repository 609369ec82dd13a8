"""The messages between a run and its environment hosts, including a form in which errors of any class can be sent."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Self

from ares_exp.containers.activity import Activity
from ares_exp.environment import EpisodeReport, PastStep, PendingRequest

MAX_DETAIL_CHARS = 20_000
"""Maximum length of the traceback of an error, in characters."""


class ForeignError(Exception):
    """Replaces an error that cannot be recreated in this process. It keeps the original class name and message."""


class Failure(NamedTuple):
    """An error in a form that can be sent to another process.

    Ray itself cannot send some errors, and changes the classes of others.

    Attributes:
        name: Name of the error's class.
        pickled: Error as pickled data: its class, the arguments of `__new__`, `args`, and all attributes that can be
            pickled; `None` if another part cannot be pickled.
        message: Message of the error.
        detail: Traceback of the error.
    """

    name: str
    pickled: bytes | None
    message: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Converts an error to a form that can be sent."""
        attributes = {name: data for name, value in vars(error).items() if (data := _pickled(value)) is not None}
        attributes.pop("__notes__", None)
        # The `args` of an `OSError` do not contain the names of files.
        arguments: Any = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
        return cls(
            name=type(error).__name__,
            pickled=_pickled((type(error), arguments, error.args, attributes)),
            message=_text_of(error),
            detail="".join(traceback.format_exception(error))[-MAX_DETAIL_CHARS:],
        )

    def error(self, host: str) -> BaseException:
        """Recreates the error, and adds a note with the traceback and the name of the host on which it was raised."""
        made = self._same_class()
        if made is None or _text_of(made) != self.message:
            made = type(self.name, (ForeignError,), {})(self.message)
        made.add_note(f"Raised on {host}:\n{self.detail}")
        return made

    def _same_class(self) -> BaseException | None:
        try:
            kind, arguments, args, attributes = pickle.loads(self.pickled or b"")
            made: BaseException = kind.__new__(kind, *arguments)
            made.args = args
            vars(made).update({name: pickle.loads(data) for name, data in attributes.items()})
        except Exception:  # the import of the class, its constructor and its attributes can raise any exception
            return None
        return made


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # `__reduce__` of the object can raise any exception
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__}, whose text cannot be read: {type(failed).__name__}"


class Outcome(NamedTuple):
    """The return value of a call in another process, or the error that the call raised."""

    value: Any = None
    failure: Failure | None = None

    @classmethod
    async def of(cls, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Self:
        """Calls a function, and returns its value or its error as an `Outcome`."""
        try:
            return cls(await function(*args, **kwargs))
        except (Exception, SystemExit) as error:
            return cls(None, Failure.of(error))

    def result(self, host: str) -> Any:
        """Returns the value, or raises the error with a note that names the host on which it was raised."""
        if self.failure is not None:
            raise self.failure.error(host)
        return self.value


class News(NamedTuple):
    """A call of `RemoteHost.on_{method}`, sent by a host. If it has a `number`, the host waits for the result."""

    number: int | None
    method: str
    arguments: tuple[Any, ...]


class EnvironmentOrder(NamedTuple):
    """A specification that the run sends to a host, from which the host creates an environment.

    Attributes:
        parts: Arguments of the environment without the factories, from `parts_to_send`.
        streams: Whether the files of the episode are stored on the node until the run fetches them.
        has_background_requests: Whether the agent can send background requests, to which the run responds.
    """

    task_name: str
    parts: Mapping[str, Any]
    streams: bool
    has_background_requests: bool = False


class Facts(NamedTuple):
    """The state of an environment after a call, which the host sends to the run with each result.

    Most fields are copies of the environment's attributes.

    Attributes:
        report: Report of the environment; `None` before the first call.
        step_type: Type of the current time step; `None` if there is no time step.
        past: Value of `past_steps`, which is only set after `reset` and `fork`.
        has_files: Whether the node still has files of the episode that the run must fetch.
    """

    report: EpisodeReport | None = None
    step_type: str | None = None
    step_count: int = 0
    time_left_sec: float | None = None
    activity: Activity | None = None
    pending: tuple[PendingRequest, ...] = ()
    past: tuple[PastStep, ...] = ()
    has_files: bool = False
