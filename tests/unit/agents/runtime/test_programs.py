"""Whatever an agent does with asyncio, it does it again when it is run against its journal."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.runtime.encoding import JournalEncoder
from ares_exp.agents.runtime.journal import CallEntry, Journal
from ares_exp.errors import JournalError
from tests.unit.agents.runtime.programs import PROGRAMS, Program, World, again, new_journal

ROOT = Path(__file__).parent.parent.parent.parent
each_program = pytest.mark.parametrize("agent", PROGRAMS.values(), ids=PROGRAMS)


async def recorded(agent: Program, seed: int = 7) -> World:
    return await World(new_journal(seed)).execute(agent)


@each_program
async def test_a_program_does_the_same_again_and_once_more(agent: Program) -> None:
    first = await recorded(agent)
    assert first.log
    assert first.runtime.journal is not None
    second = await again(agent, first.runtime.journal)
    assert second.runtime.has_ended
    assert (second.log, second.performed) == (first.log, [])
    assert second.runtime.journal is not None
    third = await again(agent, second.runtime.journal)
    assert third.log == first.log
    journals = (first.runtime.journal, second.runtime.journal)
    assert JournalEncoder().update(journals[0]) == JournalEncoder().update(journals[1])


async def test_forty_at_the_same_time_here_and_in_a_new_process() -> None:
    agents = [*(list(PROGRAMS.items()) * 2)[:39], ("everything", PROGRAMS["everything"])]
    worlds = await asyncio.gather(*(recorded(agent, seed) for seed, (_, agent) in enumerate(agents)))
    recordings: list[dict[str, Any]] = []
    for (name, agent), world in zip(agents, worlds, strict=True):
        journal = world.runtime.journal
        assert journal is not None
        assert (await again(agent, journal)).log == world.log, name
        lines = [line.decode() for line in JournalEncoder().update(journal)]
        recordings.append({"program": name, "started_at": journal.started_at, "seed": journal.seed, "lines": lines})
    for hash_seed in ("0", "1"):
        logs = await asyncio.to_thread(run_again_in_a_new_process, recordings, hash_seed)
        for recording, world, log in zip(recordings, worlds, logs, strict=True):
            assert log == json.loads(json.dumps(world.log)), recording["program"]


def run_again_in_a_new_process(recordings: list[dict[str, Any]], hash_seed: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.agents.runtime.programs"],
        input=json.dumps(recordings),
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs: list[Any] = json.loads(done.stdout)
    return logs


@pytest.mark.parametrize("agent", list(PROGRAMS.values())[:-1], ids=list(PROGRAMS)[:-1])
async def test_every_part_of_a_journal_leads_to_where_the_agent_was_then(agent: Program) -> None:
    """Wherever nothing was being carried out, as it is when an episode is exported."""
    first = await recorded(agent)
    journal = first.runtime.journal
    assert journal is not None
    for length in range(1, len(journal.entries) + 1):
        part = Journal(journal.started_at, journal.seed, journal.entries[:length])
        if length < len(journal.entries) and isinstance(journal.entries[length], CallEntry):
            continue  # the agent had not come to its rest
        try:
            world = await again(agent, part)
        except JournalError as error:
            assert "was being carried out" in str(error)  # noqa: PT017
            assert length < len(journal.entries)
            continue
        assert world.log == first.log[: len(world.log)]
        kinds = {entry.call_id: entry.kind for entry in part.entries if isinstance(entry, CallEntry)}
        assert [call.call_id for call in world.asked] == [i for i in world.runtime.open_calls if kinds[i] == "llm"]
        await world.runtime.cancel(5)
