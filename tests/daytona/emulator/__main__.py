"""`python -m tests.daytona.emulator [--box local|docker] [--port N]`: serves until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal

from tests.daytona.emulator import Emulator, Fault


async def _serve(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with Emulator(box=arguments.box, image=arguments.image, port=arguments.port) as emulator:
        if arguments.distance_ms:
            emulator.faults.add(Fault("slow", times=None, seconds=arguments.distance_ms / 1000))
        print(f"export DAYTONA_API_KEY={emulator.api_key} DAYTONA_API_URL={emulator.url}", flush=True)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.daytona.emulator", description=__doc__)
    parser.add_argument("--box", choices=("local", "docker"), default="local", help="what sandboxes are")
    parser.add_argument("--image", help="image of the default snapshot")
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0: anywhere")
    parser.add_argument("--distance-ms", type=float, default=0, help="how much later every request arrives")
    asyncio.run(_serve(parser.parse_args()))


main()
