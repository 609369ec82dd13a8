"""Calls between a run and its host: concurrent messages share a call, and no message is sent twice."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from ares_exp.environment import TimeStep, restart
from ares_exp.llms.request import LLMRequest
from ares_exp.runs.executors.environment_host import EnvironmentHost
from ares_exp.runs.executors.host_calls import CALL_BYTES, HostCalls, fitting
from ares_exp.runs.executors.host_connection import ConnectionDoubtfulError, InProcessConnection
from ares_exp.runs.executors.remote_host import RemoteHost

COUNT = 40
TEXT = "x" * 10_000


class Ready:
    """Starts at once."""

    resets = 0

    async def reset(self) -> TimeStep[Any]:
        self.resets += 1
        return restart(LLMRequest([{"role": "user", "content": TEXT}]))

    async def close(self) -> None: ...


class Connection(InProcessConnection):
    """Keeps the sizes of what it carries; `loses` so many responses first."""

    def __init__(self, host: EnvironmentHost, *, loses: int = 0) -> None:
        super().__init__(host)
        self.sizes: list[tuple[int, int]] = []
        self._loses = loses

    async def send(self, message: bytes) -> bytes:
        response = await super().send(message)
        self.sizes.append((len(message), len(response)))
        if self._loses:
            self._loses -= 1
            raise ConnectionDoubtfulError("the response is lost")
        return response


async def ran(connection: Connection, host: RemoteHost, insides: dict[str, Ready]) -> None:
    await host.start()
    replies = await asyncio.gather(*(host.call("act", name, "reset", {}, {}) for name in insides))
    assert all(reply.value.observation.rest.messages[0]["content"] == TEXT for reply in replies)
    assert [inside.resets for inside in insides.values()] == [1] * COUNT
    await host.close()


@pytest.mark.parametrize("lost", [0, 3])
async def test_concurrent_messages_share_calls_of_bounded_size(lost: int) -> None:
    inside = EnvironmentHost(lease_sec=60)
    insides = {str(number): Ready() for number in range(COUNT)}
    for name, environment in insides.items():
        inside.adopt(name, environment)
    connection = Connection(inside, loses=lost)
    await ran(connection, RemoteHost(connection, models={}, lease_sec=60), insides)
    assert len(connection.sizes) < COUNT / 2 + lost
    assert max(max(sizes) for sizes in connection.sizes) < 2 * CALL_BYTES
    assert sum(response for _, response in connection.sizes) > COUNT * len(TEXT)


async def test_a_slow_call_does_not_delay_others() -> None:
    """The next call that listens gets it."""
    may_end = asyncio.Event()

    async def work(waits: bool) -> bool:
        if waits:
            await may_end.wait()
        return waits

    calls = HostCalls({"work": work})
    messages = [(number, pickle.dumps(("work", (number == 0,)))) for number in range(3)]
    _, told = pickle.loads(await calls.take(0, (), None, messages))
    assert [number for number, _ in told] == [1, 2]
    listening = asyncio.ensure_future(calls.take(1, (0,), 60.0, ()))
    may_end.set()
    _, told = pickle.loads(await listening)
    assert [(number, pickle.loads(response)) for number, response in told] == [(0, (True, True))]
    assert pickle.loads(await calls.take(2, (1,), 0.0, ())) == (True, [])


class OfTheRunAlone:
    """Cannot be made in a host."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("no module named 'mine'")


async def test_an_unreadable_message_fails_only_its_call() -> None:
    host = RemoteHost(InProcessConnection(EnvironmentHost(lease_sec=60)), models={}, lease_sec=60)
    await host.start()
    unread, read = await asyncio.gather(
        host.call("drop", OfTheRunAlone()), host.call("drop", "nobody"), return_exceptions=True
    )
    assert str(unread) == "no module named 'mine'"
    assert isinstance(unread, ImportError)
    assert read is None
    await host.close()


def test_a_large_message_gets_a_separate_call() -> None:
    assert fitting([]) == 0
    assert fitting([2 * CALL_BYTES, 1]) == 1
    assert fitting([1, 2 * CALL_BYTES]) == 1
    assert fitting([CALL_BYTES // 2] * 3) == 2
