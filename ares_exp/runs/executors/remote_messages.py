"""The messages between a run and its environment hosts, including a form in which errors of any class can be sent."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Self, TypeAlias

from ares_exp.containers.activity import Activity
from ares_exp.environment import EpisodeReport, PastStep, PendingRequest

MAX_DETAIL_CHARS = 20_000
"""Maximum length of the traceback of an error, in characters."""


News: TypeAlias = tuple[int | None, str, tuple[Any, ...]]
"""A call of `RemoteHost.on_{method}`, sent by a host: a number, the method and its arguments.

If the number is not `None`, the host waits for the result.
"""


class ForeignError(Exception):
    """Replaces an error that cannot be recreated in this process. It keeps the original class name and message."""


class Failure(NamedTuple):
    """An error in a form that can be sent to another process.

    Ray itself cannot send some errors, and changes the classes of others.

    Attributes:
        name: Name of the error's class.
        pickled: Error as pickled data: its class, the arguments of `__new__`, `args`, and all attributes that can be
            pickled; empty if another part cannot be pickled.
        message: Message of the error.
        detail: Traceback of the error.
    """

    name: str
    pickled: bytes
    message: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Converts an error to a form that can be sent."""
        attributes = {name: data for name, value in vars(error).items() if (data := _pickled(value))}
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
        made: BaseException | None
        try:
            kind, arguments, args, attributes = pickle.loads(self.pickled)
            made = kind.__new__(kind, *arguments)
            made.args = args
            vars(made).update({name: pickle.loads(data) for name, data in attributes.items()})
        except Exception:  # the import of the class, its constructor and its attributes can raise any exception
            made = None
        if made is None or _text_of(made) != self.message:
            made = type(self.name, (ForeignError,), {})(self.message)
        made.add_note(f"Raised on {host}:\n{self.detail}")
        return made


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # `__reduce__` of the object can raise any exception
        return b""


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__}, whose text cannot be read: {type(failed).__name__}"


async def result_or_failure(function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and returns its result, or its error as a `Failure`."""
    try:
        return await function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        return Failure.of(error)


def unless_failed(result: Any, host: str) -> Any:
    """Returns the result of a call on `host`. Raises the error instead if the result is a `Failure`."""
    if isinstance(result, Failure):
        raise result.error(host)
    return result


class Facts(NamedTuple):
    """The state of an environment after a call, which the host sends to the run with each result.

    Most fields are copies of the environment's attributes.

    Attributes:
        report: Report of the environment; `None` before the first call.
        step_type: Type of the current time step; `None` if there is no time step.
        past: Value of `past_steps`, which is only set after `reset`.
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
