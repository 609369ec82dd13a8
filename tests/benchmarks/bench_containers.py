"""What a Docker container costs, ours beside docker-py used the plain way: the table in docs/numbers.md.

Run by hand, with an engine: `python -m tests.benchmarks.bench_containers [IMAGE]`. It takes two minutes.
"""

import asyncio
import sys

from tests.benchmarks import bench_build, bench_exec, bench_lifecycle
from tests.benchmarks.comparison import HEADER


async def main(image: str) -> None:
    print(HEADER)
    for benchmark in (bench_exec, bench_lifecycle, bench_build):
        await benchmark.main(image)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
