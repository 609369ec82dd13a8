"""What a step costs through each wrapper, on an environment that does nothing.

Run: `python tests/benchmarks/bench_wrappers.py [steps]`. Prints microseconds per step: median of 9 rounds (best).
"""

import asyncio
import statistics
import sys
import time

from ares_exp.environment import TimeStep, complete, restart, transition
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.wrappers.async_gym import drive_async_gym
from ares_exp.wrappers.gym_in_thread import drive_sync_gym
from ares_exp.wrappers.sync_gym import GymWrapper

ROUNDS = 9
REQUEST = LLMRequest(messages=[{"role": "user", "content": "?"}])
ACTION = LLMResponse.from_text("!")


class IdleEnvironment:
    async def reset(self) -> TimeStep:
        return restart(REQUEST)

    async def step(self, action) -> TimeStep:
        return transition(REQUEST)

    async def close(self) -> None: ...

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc) -> None: ...


def report(name: str, rounds: list[float], steps: int) -> None:
    per_step = [1e6 * seconds / steps for seconds in rounds]
    print(f"{name:<48} {statistics.median(per_step):8.1f}  ({min(per_step):.1f})")


async def drive(driver, steps: int) -> list[float]:
    rounds = []
    async with driver:
        await driver.reset()
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(steps):
                await driver.step(ACTION)
            rounds.append(time.perf_counter() - started)
    return rounds


def call(step, steps: int) -> list[float]:
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(steps):
            step(ACTION)
        rounds.append(time.perf_counter() - started)
    return rounds


def main(steps: int) -> None:
    print(f"{'us per step':<48} {'median':>8}  (best)")
    for name, driver in (
        ("wrapper=none   the environment itself", complete),
        ("wrapper=async  AsyncGymWrapper", drive_async_gym),
        ("wrapper=sync   GymWrapper in a worker thread", drive_sync_gym),
    ):
        report(name, asyncio.run(drive(driver(IdleEnvironment()), steps)), steps)
    with GymWrapper(IdleEnvironment()) as gym:
        gym.reset()
        report("GymWrapper called from a script", call(gym.step, steps), steps)
    env = IdleEnvironment()
    report("for comparison: asyncio.run per step", call(lambda a: asyncio.run(env.step(a)), steps), steps)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
