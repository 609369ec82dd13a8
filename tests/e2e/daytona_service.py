"""The Daytona emulator next to a test that blocks: on a separate event loop, in a thread."""

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.daytona.emulator import Emulator
from tests.daytona.emulator.sandboxes import Sandbox
from tests.leaks import wait_until

STARTED_WITHIN_SEC = 30.0


class DaytonaService:
    """Serves while its context lasts.

    Attributes:
        emulator: To be looked at; what changes it goes through `do`.
        env: The variables that lead to it.
    """

    def __init__(self) -> None:
        self.emulator = Emulator()
        self.env: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="Daytona emulator")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(STARTED_WITHIN_SEC)
        assert self._failure is None, self._failure
        self.env = {
            "DAYTONA_API_KEY": self.emulator.api_key,
            "DAYTONA_API_URL": self.emulator.url,
            **dict.fromkeys(("DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID", "DAYTONA_TARGET"), ""),
        }
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.do(self._ended.set)
        self._thread.join()
        if exc is None and self._failure is not None:
            raise self._failure

    def do(self, change: Callable[[], object]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(change)

    def sandboxes(self, of: int | None = None) -> list[Sandbox]:
        found = list(self.emulator.sandboxes.values())
        return [one for one in found if of is None or one.labels.get("ares_exp.pid") == str(of)]

    def is_empty(self) -> bool:
        return wait_until(lambda: not self.sandboxes())

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # for the thread that waits
            self._failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self.emulator:
            self._started.set()
            await self._ended.wait()
