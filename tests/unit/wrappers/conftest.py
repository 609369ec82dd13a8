import threading
import time

import pytest


def wait_until_gone(before, limit_sec=30.0):
    deadline = time.monotonic() + limit_sec
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("asyncio_"):  # the test loop's own executor
            thread.join(max(0.0, deadline - time.monotonic()))
    return {t.name for t in set(threading.enumerate()) - before if not t.name.startswith(("asyncio_", "docker "))}


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert wait_until_gone(before) == set()
