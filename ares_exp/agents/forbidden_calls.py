"""Sees an agent call what gives another value every time, whatever it has imported it as."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ares_exp.journal.agent_loop import AgentLoop

_CLOCKS = {f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")}
_BY_OWNER = {
    "time": _CLOCKS,
    "posix": {"urandom", "getrandom"},
    "_thread": {"start_new_thread", "start_joinable_thread"},
    "_posixsubprocess": {"fork_exec"},
}
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


class ForbiddenCalls:
    """A context manager: inside, the calls of one agent's code are looked at.

    Attributes:
        found: What it called that it should not, each with its place; in the order in which that was first done.
    """

    def __init__(self, package: str) -> None:
        """Looks at nothing yet.

        Args:
            package: Name of the top-level package that the agent's own code is in. What other packages do by themselves
                is their affair.
        """
        self.found: dict[str, None] = {}
        self._package = package
        self._before: Any = None

    def __enter__(self) -> Self:
        """Begins to look."""
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        """Looks no more."""
        sys.setprofile(self._before)

    def __str__(self) -> str:
        """A sentence to be added to a message; empty when nothing was found."""
        return f" It calls {', '.join(self.found)}." if self.found else ""

    def _look(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or (name := _forbidden(function)) is None:
            return
        if isinstance(asyncio.events._get_running_loop(), AgentLoop):
            caller: FrameType | None = frame
            while caller is not None and _is_standard(caller) and not name.startswith("time."):
                caller = caller.f_back
            if caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == self._package:
                self.found[f"{name}() in {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"] = None


def _forbidden(function: Any) -> str | None:
    """The name of a function that gives another value every time; `None` of any other."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, type) and issubclass(owner, datetime.datetime) and name in ("now", "utcnow"):
        return f"datetime.{name}"
    if name == "connect" and type(owner).__module__ in ("socket", "_socket"):
        return "socket.connect"
    module = getattr(owner, "__name__", "")
    return f"{module}.{name}" if isinstance(module, str) and name in _BY_OWNER.get(module, ()) else None


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<frozen") or (path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path)
