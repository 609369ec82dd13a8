"""An environment in a host of this process, which is called like a Ray actor."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.source import EpisodeParts
from ares_exp.llms.request import LLMClient
from ares_exp.runs.executors.environment_host import EnvironmentHost
from ares_exp.runs.executors.remote_host import RemoteEnvironment, RemoteHost


class RayError(Exception):
    """Is raised by calls of a killed host."""


class InProcessRay:
    """Stands in for Ray with one actor, a host in this process."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, host: EnvironmentHost) -> None:
        self.call = self
        self._host = host
        self._calls: set[asyncio.Task[bytes]] = set()
        self._is_killed = asyncio.Event()

    def remote(self, words: bytes) -> asyncio.Task[bytes]:
        call = asyncio.create_task(self._called(words))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _called(self, words: bytes) -> bytes:
        working = asyncio.create_task(self._host.call(words))
        killed = asyncio.create_task(self._is_killed.wait())
        try:
            await asyncio.wait({working, killed}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_killed.is_set():
                raise RayError("it was killed")
            return working.result()
        finally:
            killed.cancel()
            working.cancel()
            await asyncio.wait({working})

    def cancel(self, call: asyncio.Task[bytes]) -> None:
        call.cancel()

    def kill(self, actor: object) -> None:
        for call in self._calls:
            call.get_loop().call_soon_threadsafe(self._is_killed.set)


def hosted(inside: EnvironmentHost, models: Sequence[OwnModel] = (), *, lease_sec: float = 60.0) -> RemoteHost:
    ray, by_key = InProcessRay(inside), {model.key: model for model in models}
    return RemoteHost(ray=ray, actor=ray, node="in-process", models=by_key, lease_sec=lease_sec)


def parts(**more: Any) -> EpisodeParts:
    """Arguments of an environment, without factories."""
    factory: Any = None
    return EpisodeParts(factory, factory, EpisodeLimits(), seed=0, **more)


class HostedEnvironment(RemoteEnvironment):
    """Lives in a separate host, which starts with its first call and ends when it is closed.

    Attributes:
        inside_now: The host.
    """

    inside_now: EnvironmentHost

    def __init__(
        self,
        make_environment: Callable[[], MinimalEnvironment],
        models: Sequence[OwnModel] = (),
        *,
        lease_sec: float = 60.0,
        files: Path | None = None,
        output_dir: Path | None = None,
        background_client: LLMClient | None = None,
    ) -> None:
        no_host: Any = SimpleNamespace(guests={}, why_lost="")
        super().__init__(no_host, "a task", parts(output_dir=output_dir, background_client=background_client))
        self._make_environment = make_environment
        self._models, self._lease_sec = models, lease_sec
        self._shares_disk, self._files = files is None, files or output_dir

    async def _asked_of_host(self, method: str, *arguments: Any) -> Any:
        if not isinstance(self.host, RemoteHost) or self.host.why_lost == "the run has ended":
            inside = self.inside_now = EnvironmentHost(self._lease_sec)
            inside.shares_disk = self._shares_disk
            inside.adopt(self.name, self._make_environment(), files=self._files)
            self.host = hosted(inside, self._models, lease_sec=self._lease_sec)
            await self.host.start()
            self.host.guests[self.name] = self
        return await super()._asked_of_host(method, *arguments)

    async def close(self) -> None:
        await super().close()
        if isinstance(self.host, RemoteHost):
            await self.host.close()
