import threading
import time

import pytest

POOLS = ("asyncio_", "docker ")
"""Names of threads that stay: those of the test loop's own executor, and of the clients of engines."""


def wait_until_gone(before, limit_sec=30.0):
    def left():
        return {one for one in set(threading.enumerate()) - before if not one.name.startswith(POOLS)}

    deadline = time.monotonic() + limit_sec
    for thread in left():
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread.name for thread in left()}


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert wait_until_gone(before) == set()
