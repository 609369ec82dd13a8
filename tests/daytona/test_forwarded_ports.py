"""Forwarded ports of sandboxes whose run is killed, or is not heard for a while."""

import asyncio
import logging

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract, Server, echo, greet, greet_at_last, port_of
from tests.daytona.emulator import Emulator
from tests.killed_forwarded_port import killed_forwarded_port

pytestmark = pytest.mark.once


@pytest.mark.root
@pytest.mark.nightly
async def test_killed_process_closes_its_forwarded_port(emulator: Emulator) -> None:
    async with killed_forwarded_port("daytona", {}) as forwarded_port:
        assert len(forwarded_port.relays) == 1
        assert await asyncio.to_thread(forwarded_port.is_gone)


async def test_silent_forwarded_port_reopens_each_time(emulator: Emulator, caplog: pytest.LogCaptureFixture) -> None:
    """A short outage of the service cuts open connections; an agent's client tries again."""
    caplog.set_level(logging.INFO)
    spec = ContainerSpec("forwarded_ports", docker_image="debian:12.9", network=NO_NETWORK)
    async with DaytonaContainerFactory(forwarded_port_lease_sec=1)(spec) as box:
        forwarded_port = await box.forward_port(Server(echo))  # type: ignore[attr-defined]
        for number in range(1, 4):
            emulator.traffic.input_passes.clear()
            async with asyncio.timeout(60):
                while "received no message for 1 s" not in caplog.text:  # noqa: ASYNC110 (it happens in the sandbox)
                    await asyncio.sleep(0.05)
            emulator.traffic.input_passes.set()
            caplog.clear()
            assert (await box.exec(greet_at_last(port_of(forwarded_port)), timeout_sec=60)).output == "hello\n", number
        assert not forwarded_port._lost.done()
        await forwarded_port.close()


async def test_idle_forwarded_port_sends_no_requests(emulator: Emulator) -> None:
    spec = ContainerSpec("forwarded_ports", docker_image="debian:12.9", network=NO_NETWORK)
    async with (
        DaytonaContainerFactory(forwarded_port_lease_sec=2)(spec) as box,
        ForwardedPortContract().opened(box) as (port, _),
    ):
        assert (await box.exec(greet(port))).output == "hello\n"
        await box.exec("true")
        before = len(emulator.requests)
        await asyncio.sleep(3)
        assert len(emulator.requests) - before <= 1  # a spare shell may be opened
        assert (await box.exec(greet(port))).output == "hello\n"
