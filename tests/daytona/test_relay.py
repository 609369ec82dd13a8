"""Shells of a sandbox over requests that get lost, come twice, or are answered by somebody else."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from ares_exp.containers.command_runner import CommandRunner
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.relay_script import CHUNK_BYTES, Chunk, chunks
from ares_exp.containers.daytona.sandbox_relay import Relay
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerServiceUnavailableError

pytestmark = [pytest.mark.local, pytest.mark.once]

LARGE = "seq 1 60000"


class Requests:
    """Runs commands in a box, each in a shell of its own, and misbehaves as told."""

    def __init__(self, box: LocalContainer) -> None:
        self.box = box
        self.count = 0
        self.down = False
        self.twice = False
        self.answer: tuple[int, str] | None = None

    async def __call__(self, script: str, seconds: float) -> tuple[int, str]:
        self.count += 1
        if self.down:
            raise ContainerServiceUnavailableError("The service is down.", status=503)
        if self.answer is not None:
            return self.answer
        if self.twice:  # the first answer got lost: asked again, while the first may still be in progress
            lost = asyncio.create_task(self._run(script))
            await asyncio.sleep(0.02)
            try:
                return await self._run(script)
            finally:
                lost.cancel()
                await asyncio.wait({lost})
        return await self._run(script)

    async def _run(self, script: str) -> tuple[int, str]:
        stream = await self.box._open_shell("root")
        try:
            await stream.write(f"({script}); code=$?; echo; echo exit $code; exit\n".encode())
            output = b""
            while data := await stream.read():
                output += data
        finally:
            stream.close()
        text, _, code = output.decode("utf-8", "replace").rpartition("\nexit ")
        return int(code or -1), text


@pytest.fixture
async def requests() -> AsyncIterator[Requests]:
    async with LocalContainerFactory()(ContainerSpec("relay")) as box:
        assert isinstance(box, LocalContainer)
        yield Requests(box)


@pytest.fixture
async def relay(requests: Requests) -> AsyncIterator[Relay]:
    relay = Relay(requests)
    try:
        yield relay
    finally:
        await relay.close()


@pytest.fixture
async def pool(relay: Relay) -> AsyncIterator[CommandRunner]:
    pool = CommandRunner(relay.open)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


async def digest(pool: CommandRunner, command: str) -> str:
    result = await pool.exec(command, timeout_sec=60)
    assert (result.exit_code, result.elided_bytes) == (0, 0)
    return hashlib.sha256(result.output.encode()).hexdigest()


async def test_a_command_costs_three_requests_at_most(pool: CommandRunner, requests: Requests) -> None:
    await pool.exec("true")
    before = requests.count
    for number in range(10):
        assert (await pool.exec(f"echo {number}")).output == f"{number}\n"
    assert requests.count - before <= 30 + 2  # and an idle poll that ended meanwhile


async def test_a_large_command_for_shells_that_rest(pool: CommandRunner, relay: Relay) -> None:
    await pool.exec("true")
    async with asyncio.timeout(30):
        while not relay._is_idle:  # noqa: ASYNC110 (it happens in the box)
            await asyncio.sleep(0.01)
        assert (await pool.exec(f"x={'y' * 90_000}; echo ${{#x}}")).output == "90000\n"


async def test_nothing_is_lost_or_doubled_when_requests_come_twice(pool: CommandRunner, requests: Requests) -> None:
    expected = hashlib.sha256("".join(f"{n}\n" for n in range(1, 60001)).encode()).hexdigest()
    assert await digest(pool, LARGE) == expected
    requests.twice = True
    assert await digest(pool, LARGE) == expected
    for number in range(5):
        assert (await pool.exec(f"echo {number} >>/tmp/said; echo {number}")).output == f"{number}\n"
    assert (await pool.exec("cat /tmp/said")).output == "0\n1\n2\n3\n4\n"
    long = f"x={'y' * 200_000}; echo ${{#x}}"
    assert (await pool.exec(long)).output == "200000\n"


async def test_a_flood_is_held_up(pool: CommandRunner, relay: Relay) -> None:
    await pool.exec("yes", timeout_sec=1)
    left = await pool.exec(f"cat {relay.directory}/[0-9]*.[0-9]* 2>/dev/null | wc -c")
    assert int(left.output) < 40 * CHUNK_BYTES


async def test_a_flood_that_nobody_reads_holds_up_no_other_shell(relay: Relay) -> None:
    flooded, other = await relay.open(None), await relay.open(None)
    await flooded.write(b"yes\n")
    async with asyncio.timeout(60):
        while not flooded.is_full:  # noqa: ASYNC110 (it happens in the box)
            await asyncio.sleep(0.01)
        for number in range(3):
            await other.write(f"echo {number}\n".encode())
            assert await other.read() == f"{number}\n".encode()
        flooded.close()
        await other.write(b"echo on\n")
        assert await other.read() == b"on\n"


async def test_what_was_open_is_gone_with_its_directory(pool: CommandRunner, relay: Relay) -> None:
    running = asyncio.create_task(pool.exec("sleep 100", timeout_sec=100))
    await pool.exec("true")
    # The pause lets the relay report the start of the command: what has not started is run again, in a new shell.
    await pool.exec(f"sleep 1; mv {relay.directory} {relay.directory}.gone", timeout_sec=30)
    assert (await pool.exec("echo again", timeout_sec=30)).output == "again\n"
    running.cancel()
    await asyncio.wait({running})


async def test_a_shell_that_is_closed_ends_in_the_box(relay: Relay, requests: Requests) -> None:
    stream = await relay.open(None)
    await stream.write(b"echo $$\n")
    pid = int(await stream.read())
    other = await relay.open(None)
    stream.close()
    with pytest.raises(BrokenPipeError):
        await stream.write(b"true\n")
    await other.write(
        f"while [ -d /proc/{pid} ] || ls {relay.directory}/0.* 2>/dev/null; do sleep 0.01; done; echo gone\n".encode()
    )
    async with asyncio.timeout(10):
        said = b""
        while b"gone" not in said:
            said += await other.read()


async def test_a_service_that_is_down(pool: CommandRunner, relay: Relay, requests: Requests) -> None:
    running = asyncio.create_task(pool.exec("sleep 100"))
    await pool.exec("true")
    requests.down = True
    relay._poll_anew()
    with pytest.raises(ContainerError, match="service is down"):
        await pool.exec("true")
    with pytest.raises(ContainerError, match="service is down"):
        await running
    requests.down = False
    assert (await pool.exec("echo back")).output == "back\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((0, ""), "ends commands at once"),
        ((1, "sh: not found"), "not found"),
        ((0, "KEY 0 5000000\n!!!\n"), "Expected base64"),
        ((0, "KEY 0 1\n\n"), "Expected 1 to 65536 bytes"),
        ((0, "KEY ../0 1\nQQ==\n"), "Expected the number"),
    ],
)
async def test_somebody_else_answers(relay: Relay, requests: Requests, answer: tuple[int, str], said: str) -> None:
    stream = await relay.open(None)
    requests.answer = (answer[0], answer[1].replace("KEY", relay._key))
    relay._poll_anew()
    with pytest.raises(OSError, match=said):
        await asyncio.wait_for(stream.read(), 30)


async def test_no_such_program(requests: Requests) -> None:
    requests.answer = (1, "it has no program timeout")
    with pytest.raises(ContainerError, match="it has no program timeout"):
        await Relay(requests).open(None)


async def test_closed(relay: Relay, requests: Requests) -> None:
    stream = await relay.open(None)
    opening = asyncio.create_task(relay.open(None))
    await asyncio.sleep(0)
    await relay.close()
    assert await stream.read() == b""
    with pytest.raises(ContainerDiedError):
        await opening


def test_chunks() -> None:
    text = "noise\nk 3 0\nQUJD\nREVG\nk 3 1\nRw==\nk 4 end\n"
    assert chunks("k", text) == [Chunk(3, 0, b"ABCDEF"), Chunk(3, 1, b"G"), Chunk(4, 0, None)]
