"""Errors that a host sends to its run, and the placement of environments on hosts."""

import asyncio
import inspect
import pickle
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

import ares_exp.errors as errors_module
from ares_exp.errors import AresExpError, PreflightError, RefusalError
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.executors.placement import Placement, beside
from ares_exp.runs.executors.remote_messages import Failure

CLASSES = sorted(
    (one for _, one in inspect.getmembers(errors_module, inspect.isclass) if issubclass(one, AresExpError)),
    key=lambda one: one.__name__,
)


def crossed(error: BaseException) -> BaseException:
    return pickle.loads(pickle.dumps(Failure.of(error))).error("a node")  # type: ignore[no-any-return]


def made(kind: type[AresExpError]) -> AresExpError:
    """An instance, whatever the constructor needs."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    needed = {
        one.name: 3 for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is inspect.Parameter.empty
    }
    return kind("what happened", **needed)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_its_class(kind: type[AresExpError]) -> None:
    error = made(kind)
    arrived = crossed(error)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args) == (str(error), error.args)
    assert {name: value for name, value in vars(arrived).items() if name != "__notes__"} == vars(error)
    assert "a node" in arrived.__notes__[0]


def test_the_attributes_of_an_error_arrive() -> None:
    refusal = RefusalError("no")
    refusal.response = LLMResponse.from_text("I will not.")
    arrived = crossed(refusal)
    assert isinstance(arrived, RefusalError)
    assert arrived.response is not None
    assert arrived.response.text == "I will not."


class Held(Exception):
    """Holds something that cannot be pickled, and takes more than its text."""

    def __init__(self, code: int, *, held: Any) -> None:
        super().__init__(f"code {code}", held)
        self.held = held

    def __str__(self) -> str:
        return str(self.args[0])


def test_an_error_that_cannot_be_pickled_keeps_its_name_and_text() -> None:
    arrived = crossed(Held(7, held=lambda: None))
    assert (type(arrived).__name__, str(arrived)) == ("Held", "code 7")


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError(2, "No such file", "f"), SystemExit(3)])
def test_errors_of_python_arrive(error: BaseException) -> None:
    arrived = crossed(error)
    assert (type(arrived), str(arrived), arrived.args) == (type(error), str(error), error.args)


def of(**slots: int) -> Placement[str]:
    placement: Placement[str] = Placement()
    for name, count in slots.items():
        placement.add(name, name, count)
    return placement


async def test_attempts_at_one_task_go_to_one_node_while_it_has_room() -> None:
    placement = of(a=8, b=8, c=8)
    async with AsyncExitStack() as stack:
        for number in range(12):
            await stack.enter_async_context(placement.slot(f"other-{number}"))
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(2)])
    assert len(found) == 1
    again = of(c=8, a=8, b=8)
    async with again.slot("task") as one, placement.slot("task") as other:
        assert one == other, "in whatever order the nodes came"


async def test_no_node_gets_much_more_than_its_share() -> None:
    placement = of(a=20, b=20, c=20)
    async with AsyncExitStack() as stack:
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert max(found.values()) <= 14
        rest = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert found + rest == Counter(a=20, b=20, c=20), "all slots are used"


async def test_it_waits_for_a_slot_and_for_a_host() -> None:
    placement: Placement[str] = Placement()

    async def execute() -> str:
        async with placement.slot("task") as host:
            return host

    waiting = [asyncio.create_task(execute()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    placement.add("a", "a", 1)
    assert await asyncio.gather(*waiting) == ["a"] * 3
    cancelled = asyncio.create_task(execute())
    cancelled.cancel()
    await asyncio.wait({cancelled})
    async with placement.slot("task") as host:
        assert host == "a"


async def test_the_more_often_it_was_lost_the_fewer_are_beside_it() -> None:
    assert [beside(losses, 64) for losses in range(4)] == [64, 8, 1, 1]
    placement = of(a=64)
    alone = asyncio.Event()

    async def suspect() -> None:
        async with placement.slot("poison", losses=2):
            alone.set()
            await asyncio.sleep(0)
            assert not newcomer.done(), "no other attempt is placed next to it"

    async def come() -> None:
        async with placement.slot("other"):
            assert running.done()

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(placement.slot("other"))
        running = asyncio.create_task(suspect())
        await asyncio.sleep(0)
        newcomer = asyncio.create_task(come())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not alone.is_set(), "it waits for an empty host, which is kept for it"
        assert not newcomer.done()
    await asyncio.gather(running, newcomer)


async def test_a_lost_host_gets_nothing_and_giving_up_ends_the_waiting() -> None:
    placement = of(a=1)
    async with placement.slot("task"):
        placement.remove("a")
    assert placement.slots == 0
    placement.give_up(PreflightError("no node"))
    with pytest.raises(PreflightError, match="no node"):
        async with placement.slot("task"):
            pass
