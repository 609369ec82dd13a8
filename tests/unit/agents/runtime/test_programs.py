"""Programs of agents: replays of their journals, agents that block the loop, and files of the host."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from ares_exp.agents.runtime.journal import CallEntry, HostFiles, Journal, JournalEncoder, decode_journal, digest_of
from ares_exp.containers.container import Container
from ares_exp.environments.agent_host import AgentHost
from ares_exp.errors import AgentError, JournalError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.testing.echo_container import RehearsalContainer
from tests.unit.agents.runtime.golden_agent import REPLIES, SEED, STARTED_AT, GoldenAgent
from tests.unit.agents.runtime.programs import PROGRAMS, Program, World, again, new_journal

ROOT = Path(__file__).parent.parent.parent.parent
each_program = pytest.mark.parametrize("agent", PROGRAMS.values(), ids=PROGRAMS)


async def recorded(agent: Program, seed: int = 7) -> World:
    return await World(new_journal(seed)).execute(agent)


@each_program
async def test_program_replays_repeatedly(agent: Program) -> None:
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


async def test_forty_programs_replay_together_in_any_process() -> None:
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
    return json.loads(done.stdout)


@pytest.mark.parametrize("agent", list(PROGRAMS.values())[:-1], ids=list(PROGRAMS)[:-1])
async def test_journal_prefix_restores_its_state(agent: Program) -> None:
    """Wherever nothing was being carried out, as it is when an episode is exported."""
    first = await recorded(agent)
    journal = first.runtime.journal
    for length in range(1, len(journal.entries) + 1):
        part = Journal(journal.started_at, journal.seed, journal.entries[:length])
        if length < len(journal.entries) and isinstance(journal.entries[length], CallEntry):
            continue  # the agent had not come to its rest
        try:
            world = await again(agent, part)
        except JournalError as error:
            assert "journal is incomplete" in str(error)  # noqa: PT017
            assert length < len(journal.entries)
            continue
        assert world.log == first.log[: len(world.log)]
        kinds = {entry.call_id: entry.kind for entry in part.entries if isinstance(entry, CallEntry)}
        assert [call.call_id for call in world.asked] == [i for i in world.runtime.open_calls if kinds[i] == "llm"]
        await world.runtime.cancel(5)


GOLDEN = sorted((Path(__file__).parent / "golden").glob("journal_*.jsonl"))
each_schema = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)


def read(path: Path) -> tuple[list[bytes], Journal]:
    lines = path.read_bytes().splitlines()
    return lines, decode_journal(lines, started_at=STARTED_AT, seed=SEED, where=str(path))


@each_schema
def test_golden_journal_is_read(path: Path) -> None:
    _, journal = read(path)
    kinds = Counter(entry.kind for entry in journal.entries if isinstance(entry, CallEntry))
    assert kinds == {"llm": 3, "exec": 6, "timer": 3, "thread": 3, "upload": 3, "download": 6}
    first, _, third = journal.steps()
    assert (first.timestamp, first.reward, third.reward, third.policy_sec) == (STARTED_AT, None, 0.0, 1.5)
    assert [command.command for command in third.commands] == [REPLIES[2]] * 2


@each_schema
async def test_golden_agent_replays(path: Path) -> None:
    lines, journal = read(path)
    container = RehearsalContainer()
    host = AgentHost(cast("Container", container), journal)
    host.restore(GoldenAgent, "Shine.", timeout_sec=None, elapsed_sec=1.0)
    assert host.runtime.has_ended
    assert await host.next_request() is None
    assert (container.commands, container.files) == (0, {})
    assert JournalEncoder().update(journal) == lines
    await host.cancel()


ASK = LLMRequest([{"role": "user", "content": "?"}])


class Slow:
    async def exec(self, command: str, **_: object) -> None:
        await asyncio.sleep(0.01)


def host_of(run: Any) -> AgentHost:
    class Agent:
        def __init__(self, *, container: Any, llm_client: Any) -> None:
            self.container, self.llm = container, llm_client

        async def run(self, task: str) -> None:
            await run(self.container, self.llm)

    host = AgentHost(Slow(), Journal(0.0, 0))  # type: ignore[arg-type]
    host.start(Agent, "task", timeout_sec=30.0)
    return host


async def test_agent_that_insists_is_stopped() -> None:
    async def insists(container: Any, llm: Any) -> None:
        while True:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await llm(ASK)

    host = host_of(insists)
    assert await host.next_request() == ASK
    await asyncio.wait_for(host.cancel(), 30)


async def test_exit_in_a_thread_is_an_error() -> None:
    async def leaves(container: Any, llm: Any) -> None:
        await asyncio.to_thread(sys.exit, 3)

    host = host_of(leaves)
    with pytest.raises(AgentError, match=r"sys\.exit\(3\)"):
        await host.next_request()
    await host.cancel()


async def test_externally_cancelled_command_is_an_error() -> None:
    async def works(container: Any, llm: Any) -> None:
        with pytest.raises(RuntimeError, match="was cancelled"):
            await container.exec("ls")
        await llm(ASK)

    async def cancelled(command: str, **_: object) -> None:
        raise asyncio.CancelledError

    host = host_of(works)
    host._hosted._container.exec = cancelled  # type: ignore[method-assign, assignment]
    assert await asyncio.wait_for(host.next_request(), 30) == ASK
    await host.cancel()


def make_tree(root: Path) -> Path:
    (root / "inner" / "deep").mkdir(parents=True)
    (root / "a").write_bytes(b"\x00\xff")
    (root / "inner" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (root / "inner" / "deep" / "run.sh").chmod(0o750)
    (root / "link").symlink_to("a")
    (root / "empty").mkdir()
    return root


def test_file_and_directory_round_trip(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    HostFiles.read(tree).write(tmp_path / "again")
    assert HostFiles.read(tmp_path / "again") == HostFiles.read(tree)
    assert (tmp_path / "again" / "inner" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["a", "inner"]
    HostFiles.read(tree / "a").write(tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == b"\x00\xff"


def test_too_large_files_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree")
    monkeypatch.setattr("ares_exp.agents.runtime.journal.MAX_BYTES", 5)
    found = HostFiles.read(tree)
    assert found.files is None
    for use in (found.to_keep, lambda: found.write(tmp_path / "again")):
        with pytest.raises(SnapshotUnsupportedError, match="more than 5 bytes"):
            use()
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/ares-exp-out", "inner/../../out", ".."])
def test_name_outside_the_target_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotUnsupportedError, match="points outside"):
        HostFiles(((name, 0o644, b"x"),)).write(tmp_path / "here")
    assert not (tmp_path / "out").exists()


def test_existing_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    with pytest.raises(SnapshotUnsupportedError, match="points outside"):
        HostFiles((("link/out", 0o644, b"x"),)).write(tmp_path / "here")
    assert not (tmp_path / "out").exists()


def test_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    one, other = make_tree(tmp_path / "one"), make_tree(tmp_path / "other")
    assert digest_of(one) == digest_of(other)
    (other / "a").write_bytes(b"changed")
    assert digest_of(one) != digest_of(other)
    (one / "a").write_bytes(b"changed")
    (one / "a").rename(one / "b")
    assert digest_of(one) != digest_of(other)
    assert digest_of(one / "b") == digest_of(other / "a")
