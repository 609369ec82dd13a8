"""The thread in which trackers write."""

import logging
import threading

import pytest

from ares_exp.trackers.background_writer import BackgroundWriter


def test_all_work_is_done_in_order() -> None:
    done: list[int] = []
    writer = BackgroundWriter("It")
    writer.start()
    for number in range(1000):
        writer.do(lambda number=number: done.append(number))  # type: ignore[misc]
    writer.finish(60)
    assert done == [*range(1000)]


def test_failures_are_counted_and_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    done: list[int] = []
    writer = BackgroundWriter("It")
    writer.start()
    writer.do(lambda: 1 / 0)
    writer.do(lambda: done.append(1))
    writer.do(lambda: 1 / 0)
    writer.finish(60)
    assert (writer.failures, done) == (2, [1])
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert caplog.messages[0] == "It failed: ZeroDivisionError: division by zero"


def test_hanging_work_does_not_affect_the_next_run() -> None:
    done: list[str] = []
    go_on = threading.Event()
    writer = BackgroundWriter("It")
    writer.start()
    writer.do(go_on.wait)
    writer.do(lambda: done.append("old"))
    writer.finish(0.01)
    assert writer.failures == 1
    writer.start()
    writer.do(lambda: done.append("new"))
    writer.finish(60)
    assert done == ["new"]
    go_on.set()
