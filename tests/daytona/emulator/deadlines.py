"""Ends sandboxes by and by: TTL and auto-stop. One timer each, moved when there is reason to."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable

from tests.daytona.emulator.sandbox import Sandbox
from tests.daytona.emulator.wire import now_text, time_text


class Deadlines:
    """The timers of all sandboxes.

    Attributes:
        minute: Seconds in a minute of the service; what is set from now on is counted in it.
    """

    def __init__(self, *, stop: Callable[[Sandbox], None], delete: Callable[[Sandbox], None]) -> None:
        """Args: stop, delete: What ends a sandbox."""
        self.minute = 60.0
        self._stop, self._delete = stop, delete

    def note_activity(self, sandbox: Sandbox) -> None:
        """Puts its auto-stop off."""
        sandbox.last_activity = asyncio.get_running_loop().time()
        sandbox.last_activity_at = now_text()

    def set_ttl(self, sandbox: Sandbox, minutes: int) -> None:
        """Minutes from now until it is removed, whatever its state; 0: never."""
        sandbox.ttl = minutes
        _cancel(sandbox.expiry)
        sandbox.expiry = sandbox.destroy_at = None
        if minutes > 0:
            seconds = minutes * self.minute
            sandbox.expiry = asyncio.get_running_loop().call_later(seconds, self._delete, sandbox)
            when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
            sandbox.destroy_at = time_text(when)

    def watch(self, sandbox: Sandbox) -> None:
        """Stops it when it has been idle for long enough, or looks again when it may have been."""
        self.cancel_idle(sandbox)
        if sandbox.auto_stop <= 0 or sandbox.state != "started":
            return
        loop = asyncio.get_running_loop()
        due = sandbox.last_activity + sandbox.auto_stop * self.minute
        if due <= loop.time():
            self._stop(sandbox)
        else:
            sandbox.idle = loop.call_at(due, self.watch, sandbox)

    def cancel_idle(self, sandbox: Sandbox) -> None:
        """Whatever it does or does not do from now on ends it not."""
        _cancel(sandbox.idle)
        sandbox.idle = None

    def cancel(self, sandbox: Sandbox) -> None:
        """Forgets its timers."""
        self.cancel_idle(sandbox)
        _cancel(sandbox.expiry)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
