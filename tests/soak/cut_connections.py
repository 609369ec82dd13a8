"""Agents of others over connections that break: many cuts, and many runs that are killed.

`python -m tests.soak.cut_connections [CUTS]` runs conversations whose connections are cut before the first byte,
midway, and around the last event, until there were so many cuts; each conversation must cost one response per turn.
"""

import asyncio
import sys
from collections import Counter

from tests.served_line import Recorder
from tests.unit.agents.interception.test_endpoint import run_through_cuts


async def main(cuts: int) -> None:
    told: Counter[str] = Counter()
    seed = 0
    while told.total() < cuts:
        told.update(await run_through_cuts(Recorder(), seed))
        seed += 1
    print(f"{told.total()} cuts in {seed} conversations, one response per turn: {dict(told)}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
