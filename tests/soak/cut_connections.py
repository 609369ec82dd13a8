"""Agents of others over connections that break: many cuts, and many runs that are killed.

`python -m tests.soak.cut_connections [CUTS]` plays conversations whose connections are cut before the first byte,
midway, and around the last event, until there were so many cuts; each conversation must cost one answer per turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from tests.served_line import Recorder
from tests.unit.agents.interception.test_endpoint import play_through_cuts


async def main(cuts: int) -> None:
    told: Counter[str] = Counter()
    seed = 0
    while told.total() < cuts:
        told.update(await play_through_cuts(Recorder(), seed))
        seed += 1
    print(f"{told.total()} cuts in {seed} conversations, one answer per turn: {dict(told)}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
