"""Calls between a run and its hosts, their encoding, and the placement of environments."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

import ares_exp.errors as errors_module
from ares_exp.environment import TimeStep, restart
from ares_exp.errors import AresExpError, PreflightError, RefusalError
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.executors.environment_host import EnvironmentHost
from ares_exp.runs.executors.host_calls import CALL_BYTES, HostCalls, fitting
from ares_exp.runs.executors.host_connection import ConnectionDoubtfulError, InProcessConnection
from ares_exp.runs.executors.placement import Placement, beside
from ares_exp.runs.executors.remote_host import RemoteHost
from ares_exp.runs.executors.remote_messages import Failure, RequestDecoder, RequestEncoder

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


async def test_slow_call_does_not_delay_others() -> None:
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


async def test_unreadable_message_fails_only_its_call() -> None:
    host = RemoteHost(InProcessConnection(EnvironmentHost(lease_sec=60)), models={}, lease_sec=60)
    await host.start()
    unread, read = await asyncio.gather(
        host.call("drop", OfTheRunAlone()), host.call("drop", "nobody"), return_exceptions=True
    )
    assert str(unread) == "no module named 'mine'"
    assert isinstance(unread, ImportError)
    assert read is None
    await host.close()


def test_large_message_gets_a_separate_call() -> None:
    assert fitting([]) == 0
    assert fitting([2 * CALL_BYTES, 1]) == 1
    assert fitting([1, 2 * CALL_BYTES]) == 1
    assert fitting([CALL_BYTES // 2] * 3) == 2


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


def test_attributes_of_an_error_arrive() -> None:
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


def test_unpicklable_error_preserves_name_and_text() -> None:
    arrived = crossed(Held(7, held=lambda: None))
    assert (type(arrived).__name__, str(arrived)) == ("Held", "code 7")


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError(2, "No such file", "f"), SystemExit(3)])
def test_python_errors_arrive(error: BaseException) -> None:
    arrived = crossed(error)
    assert (type(arrived), str(arrived), arrived.args) == (type(error), str(error), error.args)


def turns(length: int, *, conversation: str = "main", text: str = "x" * 1000) -> LLMRequest:
    messages = [{"role": "user", "content": f"{conversation} {number} {text}"} for number in range(length)]
    tools = [{"type": "function", "function": {"name": "bash", "description": text}}]
    return LLMRequest(messages, system_prompt=text, tools=tools, origin=Origin("messages", conversation=conversation))


def test_request_crosses_as_its_difference() -> None:
    encoder, decoder, sizes = RequestEncoder(), RequestDecoder(), []
    for length in range(1, 60):
        conversation = ("main", "side")[length % 2]
        request = turns(length, conversation=conversation)
        bases = dict(decoder.bases)
        encoder.acknowledge(bases)
        sent = pickle.dumps(encoder.encode(request, bases))
        sizes.append(len(sent))
        arrived = decoder.decode(pickle.loads(sent))
        decoder.forget(bases)
        assert arrived == request
        assert arrived.origin == request.origin
    assert max(sizes[2:]) < 4000, "each has two new messages, of 1,000 characters"


def test_request_that_changes_in_the_middle_arrives() -> None:
    encoder, decoder = RequestEncoder(), RequestDecoder()
    first = turns(10)
    decoder.decode(encoder.encode(first, {}))
    compacted = LLMRequest([first.messages[0], {"role": "user", "content": "In short: …"}], temperature=0.5)
    assert decoder.decode(encoder.encode(compacted, dict(decoder.bases))) == compacted


def test_undelivered_response_is_not_a_base() -> None:
    """The other side names what it has; what it has not, nothing is a difference to."""
    encoder, decoder = RequestEncoder(), RequestDecoder()
    encoder.encode(turns(3), {})
    request = turns(4)
    assert decoder.decode(encoder.encode(request, dict(decoder.bases))) == request


def of(**slots: int) -> Placement[str]:
    placement: Placement[str] = Placement()
    for name, count in slots.items():
        placement.add(name, name, count)
    return placement


async def test_attempts_at_a_task_prefer_one_node() -> None:
    placement = of(a=8, b=8, c=8)
    async with AsyncExitStack() as stack:
        for number in range(12):
            await stack.enter_async_context(placement.slot(f"other-{number}"))
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(2)])
    assert len(found) == 1
    again = of(c=8, a=8, b=8)
    async with again.slot("task") as one, placement.slot("task") as other:
        assert one == other, "in whatever order the nodes came"


async def test_nodes_get_similar_shares() -> None:
    placement = of(a=20, b=20, c=20)
    async with AsyncExitStack() as stack:
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert max(found.values()) <= 14
        rest = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert found + rest == Counter(a=20, b=20, c=20), "all slots are used"


async def test_placement_waits_for_slot_and_host() -> None:
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


async def test_repeatedly_lost_episode_gets_fewer_neighbours() -> None:
    assert [beside(losses, 64) for losses in range(4)] == [64, 8, 1, 1]
    placement = of(a=64)
    alone = asyncio.Event()

    async def suspect() -> None:
        async with placement.slot("poison", losses=2):
            alone.set()
            await asyncio.sleep(0)
            assert not newcomer.done(), "nobody comes to it"

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


async def test_lost_host_gets_no_episodes() -> None:
    placement = of(a=1)
    async with placement.slot("task"):
        placement.remove("a")
    assert placement.slots == 0
    placement.give_up(PreflightError("no node"))
    with pytest.raises(PreflightError, match="no node"):
        async with placement.slot("task"):
            pass
