"""The lag of a real event loop, and who is named while it is blocked."""

from __future__ import annotations

import asyncio
import threading
import time

from ares_exp.runs.control.runner_monitor import LoopLag

PATIENCE_SEC = 60


def _no_warning(sentence: str) -> None:
    raise AssertionError(sentence)


async def test_a_loop_that_was_held_up_was_late() -> None:
    lag = LoopLag(_no_warning, tick_sec=0.01, blocked_sec=PATIENCE_SEC)
    lag.start()
    try:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        longest, mean = lag.take()
    finally:
        lag.stop()
    assert longest >= 0.19
    assert 0 < mean <= longest
    assert lag.max_sec == longest


async def test_what_was_taken_is_not_taken_again() -> None:
    now = [0.0]
    lag = LoopLag(_no_warning, tick_sec=3600, clock=lambda: now[0], blocked_sec=10**6)
    lag.start()
    try:
        assert lag.take() == (0.0, 0.0)
        now[0] = 3600 + 7.0
        assert lag.take() == (7.0, 7.0)
        now[0] = 3600.0
        assert lag.take() == (0.0, 0.0)
        assert lag.max_sec == 7.0
    finally:
        lag.stop()


async def test_a_blocked_loop_is_named_while_it_is_blocked() -> None:
    sentences: list[str] = []
    warned, ran = threading.Event(), asyncio.Event()

    def warn(sentence: str) -> None:
        sentences.append(sentence)
        warned.set()

    def hangs_here() -> None:
        if warned.wait(PATIENCE_SEC):
            ran.set()

    lag = LoopLag(warn, tick_sec=0.01, look_sec=0.01, blocked_sec=0.1)
    lag.start()
    try:
        asyncio.get_running_loop().call_soon(hangs_here)
        await ran.wait()
    finally:
        lag.stop()
    assert "hangs_here" in sentences[0]
    assert "test_loop_lag.py" in sentences[0]
    assert "base_events" not in sentences[0]


async def test_one_block_is_reported_once() -> None:
    sentences: list[str] = []
    now, looks = [0.0], threading.Semaphore(0)

    def clock() -> float:
        if threading.current_thread().name == "loop-lag":
            now[0] += 0.5  # every look of the thread comes half a second later
            looks.release()
        return now[0]

    lag = LoopLag(sentences.append, tick_sec=0.01, look_sec=0.001, blocked_sec=5, clock=clock)
    lag.start()
    try:
        for _ in range(40):  # this holds up the loop for 20 s of that clock
            assert looks.acquire(timeout=PATIENCE_SEC)
    finally:
        lag.stop()
    assert len(sentences) == 1


async def test_a_process_that_was_stopped_as_a_whole_accuses_nobody() -> None:
    sentences: list[str] = []
    now, looks = [0.0], threading.Semaphore(0)

    def clock() -> float:
        if threading.current_thread().name == "loop-lag":
            now[0] += 1000.0  # the thread itself was away
            looks.release()
        return now[0]

    lag = LoopLag(sentences.append, tick_sec=0.01, look_sec=0.001, blocked_sec=5, clock=clock)
    lag.start()
    try:
        for _ in range(5):
            assert looks.acquire(timeout=PATIENCE_SEC)
    finally:
        lag.stop()
    assert sentences == []


async def test_nothing_stays_behind() -> None:
    lag = LoopLag(_no_warning)
    lag.start()
    assert "loop-lag" in {thread.name for thread in threading.enumerate()}
    lag.stop()
    lag.stop()
    assert "loop-lag" not in {thread.name for thread in threading.enumerate()}
