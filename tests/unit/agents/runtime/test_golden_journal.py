"""A journal that an earlier version has written stays readable, and its agent comes to the same point again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from ares_exp.agents.runtime.encoding import JournalEncoder, decode_journal
from ares_exp.agents.runtime.journal import CallEntry, Journal
from ares_exp.containers.container import Container
from ares_exp.environments.agent_host import AgentHost
from ares_exp.testing.echo_container import RehearsalContainer
from tests.unit.agents.runtime.golden_agent import REPLIES, SEED, STARTED_AT, GoldenAgent

GOLDEN = sorted((Path(__file__).parent / "golden").glob("journal_*.jsonl"))
each_schema = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)


def read(path: Path) -> tuple[list[bytes], Journal]:
    lines = path.read_bytes().splitlines()
    return lines, decode_journal(lines, started_at=STARTED_AT, seed=SEED, where=str(path))


@each_schema
def test_all_of_it_is_read(path: Path) -> None:
    _, journal = read(path)
    kinds = Counter(entry.kind for entry in journal.entries if isinstance(entry, CallEntry))
    assert kinds == {"llm": 3, "exec": 6, "timer": 3, "thread": 3, "upload": 3, "download": 6}
    first, _, third = journal.steps()
    assert (first.timestamp, first.reward, third.reward, third.policy_sec) == (STARTED_AT, None, 0.0, 1.5)
    assert [command.command for command in third.commands] == [REPLIES[2]] * 2


@each_schema
async def test_its_agent_does_it_again(path: Path) -> None:
    lines, journal = read(path)
    container = RehearsalContainer()
    host = AgentHost(cast("Container", container), journal)
    host.restore(GoldenAgent, "Shine.", timeout_sec=None, elapsed_sec=1.0)
    assert host.runtime.has_ended
    assert await host.next_request() is None
    assert (container.commands, container.files) == (0, {})
    assert JournalEncoder().update(journal) == lines
    await host.cancel()
