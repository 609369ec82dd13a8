"""`python -m tests.daytona.emulator [--box local|docker]`: serves until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import signal

from tests.daytona.emulator import Emulator
from tests.daytona.emulator.boxes import Backend


async def _serve(box: Backend) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with Emulator(box=box) as emulator:
        print(f"export DAYTONA_API_KEY={emulator.api_key} DAYTONA_API_URL={emulator.url}", flush=True)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.daytona.emulator", description=__doc__)
    parser.add_argument("--box", choices=("local", "docker"), default="local", help="what sandboxes are")
    asyncio.run(_serve(parser.parse_args().box))


main()
