import asyncio
import gc
import threading
import weakref

import pytest

from ares_exp.wrappers.loop_thread import LoopThread


@pytest.fixture
def loop_thread():
    thread = LoopThread("loop under test")
    yield thread
    thread.close()


async def give(value):
    await asyncio.sleep(0)
    return value


async def fail(error):
    raise error


def test_thread_starts_at_the_first_call(loop_thread):
    before = set(threading.enumerate())
    unused = LoopThread()
    unused.close()
    assert set(threading.enumerate()) <= before
    assert loop_thread.run(give(1)) == 1
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["loop under test"]


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("x"), KeyError(1), SystemExit(3), asyncio.CancelledError()]
)
def test_exception_is_the_same_object(loop_thread, error):
    with pytest.raises(type(error)) as caught:
        loop_thread.run(fail(error))
    assert caught.value is error
    assert loop_thread.run(give(2)) == 2


def test_exception_releases_its_call(loop_thread):
    class Box:
        pass

    async def fail_with(box):
        raise ValueError("x")

    box = Box()
    gone = weakref.ref(box)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="x"):
            loop_thread.run(fail_with(box))
        del box
        assert gone() is None
    finally:
        gc.enable()


def test_concurrent_calls_get_their_responses(loop_thread):
    responses = {}

    def ask(number):
        responses[number] = [loop_thread.run(give((number, i))) for i in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert responses == {number: [(number, i) for i in range(50)] for number in range(8)}


def test_call_above_its_timeout_is_cancelled(loop_thread):
    unwound = []

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append(True)

    with pytest.raises(TimeoutError, match=r"'loop under test' did not end within 0\.05 s"):
        loop_thread.run(wait_for_ever(), timeout=0.05)
    assert unwound == [True]


def test_interrupt_holds_until_resume(loop_thread):
    started = []

    async def start():
        started.append(True)
        await asyncio.Event().wait()

    loop_thread.run(give(None))
    loop_thread.interrupt()
    with pytest.raises(asyncio.CancelledError):
        loop_thread.run(start())
    loop_thread.resume()
    assert loop_thread.run(give(3)) == 3


def test_second_interrupt_does_not_disturb_cleanup(loop_thread):
    events, started = [], threading.Event()

    async def unwind_slowly():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            events.append("unwinding")
            loop_thread.interrupt()
            await asyncio.sleep(0.05)
            events.append("unwound")

    def interrupt_when_started():
        if started.wait(60):
            loop_thread.interrupt()

    interrupter = threading.Thread(target=interrupt_when_started)
    interrupter.start()
    with pytest.raises(asyncio.CancelledError):
        loop_thread.run(unwind_slowly())
    interrupter.join(60)
    assert events == ["unwinding", "unwound"]


def test_close_cancels_the_call_before_background_tasks():
    loop_thread, events, started, outcome = LoopThread(), [], threading.Event(), []

    async def log_cancellation(name):
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            events.append(name)

    async def start_background():
        return asyncio.create_task(log_cancellation("background"))

    async def farewell():
        events.append("farewell")

    def call():
        try:
            loop_thread.run(log_cancellation("call"))
        except BaseException as error:
            outcome.append(type(error))

    background = loop_thread.run(start_background())
    started.clear()
    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(60)
    loop_thread.close(farewell)
    caller.join(60)
    assert events == ["call", "farewell", "background"]
    assert outcome == [asyncio.CancelledError]
    assert background.cancelled()


def test_interrupt_does_not_shorten_the_farewell():
    loop_thread, said = LoopThread(), []

    async def farewell():
        await asyncio.sleep(0.01)
        said.append("farewell")

    loop_thread.interrupt()
    loop_thread.close(farewell)
    assert said == ["farewell"]


def test_failing_farewell_still_ends_the_thread():
    loop_thread, before = LoopThread(), set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        loop_thread.close(lambda: fail(ZeroDivisionError()))
    assert set(threading.enumerate()) <= before


def test_loop_cannot_wait_for_itself(loop_thread):
    async def ask_itself():
        loop_thread.run(give(1))

    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        loop_thread.run(ask_itself())


def test_exiting_task_does_not_end_the_loop(loop_thread):
    async def leave():
        raise SystemExit(3)

    async def await_leaver():
        await asyncio.create_task(leave())

    with pytest.raises(SystemExit):
        loop_thread.run(await_leaver())
    assert loop_thread.run(give(4)) == 4
