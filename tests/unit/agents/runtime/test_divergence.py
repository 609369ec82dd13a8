"""An agent that does not do the same again is told where, and what it did; and it is never told so itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ares_exp.agents.runtime.journal import CallEntry, DoneEntry, Journal
from ares_exp.errors import DivergenceError, JournalError
from ares_exp.llms.request import LLMRequest
from tests.unit.agents.runtime.programs import Program, World, again, new_journal, on_disk


async def twice(w: World) -> None:
    await asyncio.gather(w.exec("a"), w.exec("b"))
    await w.ask("question")


async def divergence(agent: Program, journal: Journal) -> str:
    with pytest.raises(DivergenceError) as caught:
        await again(agent, journal)
    error = caught.value
    assert f"after {error.step} LLM responses (entry {error.entry} of " in str(error)
    assert error.why in str(error)
    return str(error)


async def recorded(agent: Program = twice) -> Journal:
    journal = (await World(new_journal()).execute(agent)).runtime.journal
    assert journal is not None
    return journal


async def test_calls_of_one_burst_may_come_in_another_order() -> None:
    async def reversed_order(w: World) -> None:
        await asyncio.gather(w.exec("b"), w.exec("a"))
        await w.ask("question")

    await again(reversed_order, await recorded())


async def test_other_arguments() -> None:
    async def other(w: World) -> None:
        await asyncio.gather(w.exec("a"), w.exec("c"))

    message = await divergence(other, await recorded())
    assert "after 0 LLM responses (entry 1 of 6 of its journal)" in message
    assert """recorded was a call for exec {"command": "b"}, now {"command": "c"}""" in message


async def test_another_kind_of_call() -> None:
    async def other(w: World) -> None:
        await asyncio.gather(w.exec("a"), w.exec("b"))
        await w.exec("question")

    message = await divergence(other, await recorded())
    assert 'recorded was an LLM request with 1 messages, now a call for exec {"command": "question"}' in message


async def test_one_call_more_and_one_call_less() -> None:
    async def more(w: World) -> None:
        await asyncio.gather(w.exec("a"), w.exec("b"), w.exec("c"))

    async def less(w: World) -> None:
        await asyncio.gather(w.exec("a"), asyncio.Event().wait())

    assert 'it made one call more: a call for exec {"command": "c"}' in await divergence(more, await recorded())
    assert 'recorded was a call for exec {"command": "b"}; now it waited' in await divergence(less, await recorded())


async def test_ending_too_early_and_too_late() -> None:
    async def early(w: World) -> None:
        await asyncio.gather(w.exec("a"), w.exec("b"))

    async def late(w: World) -> None:
        await twice(w)
        await w.exec("late")

    assert "recorded was an LLM request with 1 messages; now it ended" in await divergence(early, await recorded())
    message = await divergence(late, await recorded())
    assert "after 1 LLM responses (entry 6 of 6 of its journal): it made one call more" in message


async def test_giving_up_what_was_waited_for() -> None:
    async def gives_up(w: World) -> None:
        tasks = [asyncio.create_task(w.exec("a")), asyncio.create_task(w.exec("b"))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    assert "it had given up call" in await divergence(gives_up, await recorded())


async def test_another_message_and_other_settings() -> None:
    async def asks(w: World, content: Any = "one", **settings: Any) -> None:
        messages = [{"role": "user", "content": "zero"}, {"role": "user", "content": content}]
        await w.runtime.call("llm", LLMRequest(messages, **settings))

    journal = await recorded(asks)
    message = await divergence(lambda w: asks(w, "1" * 1000), journal)
    assert 'message 2 of 2 of an LLM request is not the recorded one: now it is {"content": "111' in message
    assert len(message) < 900
    message = await divergence(lambda w: asks(w, [{"type": "text", "text": "in parts"}]), journal)
    assert "message 2 of 2" in message
    assert "settings of an LLM request" in await divergence(lambda w: asks(w, temperature=0.5), journal)
    assert "settings of an LLM request" in await divergence(lambda w: asks(w, system_prompt="Be kind."), journal)


async def test_more_messages_than_recorded() -> None:
    async def asks(w: World, count: int = 1) -> None:
        await w.runtime.call("llm", LLMRequest([{"role": "user", "content": "same"}] * count))

    message = await divergence(lambda w: asks(w, 2), await recorded(asks))
    assert "recorded was an LLM request with 1 messages, now an LLM request with 2 messages" in message


async def test_what_was_recorded_is_shown_where_it_is_known() -> None:
    async def asks(w: World, word: str = "black") -> None:
        text = "It is a long story. " * 20 + f"The cat is {word} and white."
        await w.runtime.call("llm", LLMRequest([{"role": "user", "content": text}]))

    journal = await recorded(asks)
    originals = {entry.call_id: entry.arguments for entry in journal.entries if isinstance(entry, CallEntry)}
    world = World(on_disk(journal))
    with pytest.raises(DivergenceError, match=r"it was ….*cat is black and white.*, now it is ….*cat is brown and wh"):
        world.runtime.replay(lambda: asks(world, "brown"), elapsed_sec=1.0, originals=originals)
    await world.runtime.cancel(5)


async def test_an_agent_that_swallows_errors_is_not_told_and_cannot_go_on() -> None:
    heard: list[BaseException] = []

    async def swallows(w: World) -> None:
        while True:
            try:
                await w.exec("other")
            except Exception as error:
                heard.append(error)

    assert "now" in await divergence(swallows, await recorded())
    assert heard == []


async def test_nothing_is_carried_out_after_a_divergence() -> None:
    async def other(w: World) -> None:
        await w.exec("other")

    world = World(on_disk(await recorded()))
    with pytest.raises(DivergenceError):
        world.runtime.replay(lambda: other(world), elapsed_sec=1.0)
    await asyncio.sleep(0)
    assert (world.performed, world.asked) == ([], [])
    await world.runtime.cancel(5)
    assert (world.performed, world.asked) == ([], [])


async def test_a_journal_that_ends_in_the_middle_of_a_call_cannot_be_followed() -> None:
    journal = await recorded()
    first_done = next(place for place, entry in enumerate(journal.entries) if isinstance(entry, DoneEntry))
    journal.entries = journal.entries[:first_done]
    with pytest.raises(JournalError, match="call for exec was being carried out"):
        await again(twice, journal)
