from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ares_exp.runs import steady_loop
from ares_exp.runs.steady_loop import SteadyEventLoop, run_steadily


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The machine's clock, and the CPU time of this process."""
    now = SimpleNamespace(monotonic=100.0, cpu=1.0)
    fake = SimpleNamespace(monotonic=lambda: now.monotonic, process_time=lambda: now.cpu)
    monkeypatch.setattr(steady_loop, "time", fake)
    return now


@pytest.fixture
def loop(clock: SimpleNamespace) -> Iterator[SteadyEventLoop]:
    loop = SteadyEventLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("passed", "cpu", "counted"),
    [(60.0, 0.1, 0.0), (60.0, 59.0, 60.0), (2.0, 0.0, 2.0)],
    ids=["stopped", "busy", "short"],
)
def test_clock_stands_still_while_stopped(
    clock: SimpleNamespace, loop: SteadyEventLoop, passed: float, cpu: float, counted: float
) -> None:
    before = loop.time()
    clock.monotonic += passed
    clock.cpu += cpu
    assert loop.time() - before == pytest.approx(counted)
    clock.monotonic += 1.0
    assert loop.time() - before == pytest.approx(counted + 1.0)


def test_time_limit_does_not_pass_while_stopped(clock: SimpleNamespace, loop: SteadyEventLoop) -> None:
    async def stopped_meanwhile() -> str:
        async with asyncio.timeout(30):
            answer = loop.create_future()
            clock.monotonic += 60.0
            loop.call_soon(answer.set_result, "in time")
            return await answer

    assert loop.run_until_complete(stopped_meanwhile()) == "in time"


def test_run_steadily_returns_the_result() -> None:
    async def main() -> bool:
        return isinstance(asyncio.get_running_loop(), SteadyEventLoop)

    assert run_steadily(main())
