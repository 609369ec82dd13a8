"""What the endpoint adds to an LLM call: from the request to the whole answer, with a policy that takes no time.

Run by hand: `python -m tests.benchmarks.bench_endpoint [--calls 300]`. A client of aiohttp on a kept-alive connection
asks through a real port, as through a forwarded port of a container on this machine; client and endpoint share one
event loop, so the client's own work is in the numbers. Requests carry a conversation of about so many bytes. Beside it
stands a bare server of aiohttp that reads the body and answers with a constant: what any HTTP endpoint would cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from ares_exp.agents.interception.line import Line
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from tests.served_line import CHAT, chat, served

SIZES = {"3 kB": 3_000, "80 kB": 80_000}
ANSWER = LLMResponse.from_text("x" * 400)


async def answer_at_once(request: LLMRequest) -> LLMResponse:
    return ANSWER


def conversation(size: int, *, stream: bool) -> Mapping[str, Any]:
    """A request of about `size` bytes: messages of 2 kB, as agents have them."""
    texts = ["y" * min(size // 2, 2000) for _ in range(max(1, size // 2000) // 2 * 2)]
    return chat(*texts, "go on", stream=stream, tools=True)


async def measure(url: str, key: str, bodies: list[bytes]) -> list[float]:
    """Milliseconds of each call."""
    took = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        for body in bodies:
            started = time.perf_counter()
            async with session.post(url, data=body) as response:
                await response.read()
                assert response.status == 200
            took.append((time.perf_counter() - started) * 1000)
    return took[len(took) // 10 :]


async def with_bare_server(act: Callable[[str], Awaitable[list[float]]]) -> list[float]:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"{}" * 300, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        return await act(f"http://127.0.0.1:{runner.addresses[0][1]}{CHAT}")
    finally:
        await runner.cleanup()


def shown(what: str, took: list[float]) -> None:
    p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    print(f"{what:<28} least {min(took):6.2f} ms   p50 {p50:6.2f} ms   p99 {p99:6.2f} ms", flush=True)


async def main(calls: int) -> None:
    for name, size in SIZES.items():
        for stream in (False, True):
            bodies = [json.dumps(conversation(size, stream=stream)).encode()] * calls
            async with served(Line(answer_at_once)) as port:
                took = await measure(port.url + CHAT, port.line.key, bodies)
            shown(f"{name}, {'streamed' if stream else 'whole'}", took)
        bare = await with_bare_server(lambda url, bodies=bodies: measure(url, "k", bodies))  # type: ignore[misc]
        shown(f"{name}, a bare server", bare)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    asyncio.run(main(parser.parse_args().calls))
