"""The endpoint of these tests: what it leaves behind would be told of another test."""

from __future__ import annotations

import asyncio
import gc
import socket
from urllib.parse import urlsplit

import pytest

from tests.loopback_endpoint import LoopbackEndpoint


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_connection_that_comes_at_the_very_end_is_closed(turns: int) -> None:
    connect_and_end(turns).close()
    gc.collect()  # an unclosed socket is an error of this test


def connect_and_end(turns: int) -> socket.socket:
    """Connects to an endpoint, which is told to end so many turns of its loop later."""
    endpoint = LoopbackEndpoint()
    made: list[socket.socket] = []

    def connect(loop: asyncio.AbstractEventLoop) -> None:
        made.append(socket.create_connection(("127.0.0.1", urlsplit(endpoint.url).port or 0)))
        end_in(turns, loop)

    def end_in(turns: int, loop: asyncio.AbstractEventLoop) -> None:
        if turns:
            loop.call_soon(end_in, turns - 1, loop)
        else:
            endpoint._stop.set()

    endpoint.__enter__()
    assert endpoint._loop is not None
    endpoint._loop.call_soon_threadsafe(connect, endpoint._loop)
    endpoint._thread.join(60)
    made[0].settimeout(60)
    assert made[0].recv(1) == b""
    return made.pop()
