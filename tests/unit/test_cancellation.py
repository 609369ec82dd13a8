import asyncio
import gc
import threading

import pytest

from ares_exp.cancellation import in_thread


async def test_failure_after_a_cancellation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        go_on.wait(60)
        raise OSError("late")

    task = asyncio.create_task(in_thread(fail))
    await asyncio.to_thread(started.wait, 60)
    task.cancel()
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert caplog.text == ""
