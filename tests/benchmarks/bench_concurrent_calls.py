"""What it takes when an agent asks several things at once, and what that costs an agent that asks one.

Run by hand: `python tests/benchmarks/bench_concurrent_calls.py`. Prints the wall seconds of an episode whose agent asks
five things at once, each answered after 2 s, and the CPU microseconds per step of the shell agent (one call at a time):
with a policy that is asked for one answer after the other, and with one that may be asked for several at once.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.rollout import run_episode
from tests.benchmarks.bench_step import EPISODES, STEPS, InMemoryFactory, InMemoryTask, InstantPolicy

CALLS, ANSWER_SEC, ROUNDS = 5, 2.0, 9


class FanOut:
    """Asks `CALLS` things at once, and is done."""

    def __init__(self, container: object, llm_client: Any) -> None:
        self._llm = llm_client

    async def run(self, task: str) -> None:
        questions = [LLMRequest([{"role": "user", "content": f"{task} {number}"}]) for number in range(CALLS)]
        await asyncio.gather(*map(self._llm, questions))


class SlowPolicy:
    """Answers everything after `ANSWER_SEC`."""

    def __init__(self, concurrency: int) -> None:
        self.max_concurrency_per_episode = concurrency

    async def __call__(self, request: object) -> LLMResponse:
        await asyncio.sleep(ANSWER_SEC)
        return LLMResponse.from_text("Yes.")


class InstantConcurrentPolicy(InstantPolicy):
    """One that may be asked for several answers at once."""

    max_concurrency_per_episode = 16


async def play(agents: Any, policy: Any) -> None:
    env = CodeEnvironment([InMemoryTask()], container_factory=InMemoryFactory(), code_agent_factory=agents)  # type: ignore[arg-type, list-item]
    await run_episode(env, policy)


async def seconds(concurrency: int) -> float:
    started = time.perf_counter()
    await play(lambda *, container, llm_client: FanOut(container, llm_client), SlowPolicy(concurrency))
    return time.perf_counter() - started


async def step_cost(make_policy: type[InstantPolicy]) -> float:
    """CPU microseconds per step, of one round."""
    agents = ShellAgentFactory()
    started = time.process_time()
    for _ in range(EPISODES):
        await play(agents, make_policy())
    return (time.process_time() - started) / (EPISODES * STEPS) * 1e6


async def main() -> None:
    print(f"{CALLS} calls of {ANSWER_SEC:g} s at once, wall seconds of the episode")
    for concurrency in (1, CALLS):
        print(f"  {concurrency} at once: {await seconds(concurrency):.2f}")
    costs: dict[type[InstantPolicy], list[float]] = {InstantPolicy: [], InstantConcurrentPolicy: []}
    for _ in range(ROUNDS):
        for kind, samples in costs.items():  # in turns: the machine's mood is the same for both
            samples.append(await step_cost(kind))
    print(f"one call at a time, CPU us per step, median of {ROUNDS} rounds")
    for kind, samples in costs.items():
        print(f"  {kind.__name__}: {statistics.median(samples):.1f}")


if __name__ == "__main__":
    asyncio.run(main())
