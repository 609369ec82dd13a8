"""How long it takes to bring an agent back to where its journal ends: the shell agent, in-memory container.

Run by hand: `python tests/benchmarks/bench_replay.py`. Prints milliseconds to write a journal of 250 steps with outputs
of 4 kB, to read it, and to run the agent against it; and microseconds to write what one more step adds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import cast

from ares_exp.agents.runtime.encoding import JournalEncoder, decode_journal
from ares_exp.agents.runtime.journal import Journal, StepEntry
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import Container, ExecResult
from ares_exp.environments.agent_host import AgentHost
from ares_exp.llms.response import LLMResponse
from ares_exp.testing.echo_container import RehearsalContainer

STEPS, OUTPUT_BYTES, ROUNDS = 250, 4096, 7


def answer(command: str) -> ExecResult:
    return ExecResult((f"{command}: one line of output\n" * OUTPUT_BYTES)[:OUTPUT_BYTES], 0, 0.01)


async def record(agents: ShellAgentFactory) -> tuple[Journal, list[float]]:
    """A journal, and how long writing each step took."""
    journal, encoder, times = Journal(time.time(), 1), JournalEncoder(), []
    host = AgentHost(cast("Container", RehearsalContainer(answer)), journal)
    host.start(agents, "Do it.", timeout_sec=None)
    for step in range(STEPS):
        await host.next_request()
        assert host.observed is not None
        journal.entries.append(StepEntry(host.observed.call_id, time.time()))
        started = time.perf_counter()
        encoder.update(journal)
        times.append(time.perf_counter() - started)
        host.answer(LLMResponse.from_text(f"I look at file {step}.\n\n```bash\ncat file{step}\n```\n"))
    await host.next_request()
    await host.cancel()
    return journal, times


async def main() -> None:
    agents = ShellAgentFactory()
    await agents.preflight()
    journal, each = await record(agents)
    writing, reading, running = [], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        lines = JournalEncoder().update(journal)
        written = time.perf_counter()
        again = decode_journal(lines, started_at=journal.started_at, seed=journal.seed, where="the benchmark")
        read = time.perf_counter()
        host = AgentHost(cast("Container", RehearsalContainer()), again)
        host.restore(agents, "Do it.", timeout_sec=None, elapsed_sec=1.0)
        running.append(time.perf_counter() - read)
        writing.append(written - started)
        reading.append(read - written)
        await host.cancel()
    print(f"{STEPS} steps, {len(lines)} entries, {sum(map(len, lines)) / 1e6:.1f} MB; Python {sys.version.split()[0]}")
    for name, times, unit in (("write", writing, 1e3), ("read", reading, 1e3), ("run again", running, 1e3)):
        print(f"{name:<24}{statistics.median(times) * unit:>10.1f} ms")
    print(f"{'write one step more':<24}{statistics.median(each) * 1e6:>10.1f} us")


if __name__ == "__main__":
    asyncio.run(main())
