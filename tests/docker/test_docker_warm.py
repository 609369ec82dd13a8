"""Containers that are started ahead, on a real engine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import docker
import pytest
from docker.errors import NotFound

from ares_exp.containers import warm_pool
from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.warm_pool import WarmPool
from ares_exp.errors import ContainerDiedError, ContainerStartError

pytestmark = [pytest.mark.docker, pytest.mark.once]

SPEC = ContainerSpec("warm", docker_image="debian:bookworm-slim", env={"WHICH": "one"})
SOON_SEC = 30.0


class Maker:
    """Makes containers of the real backend and remembers them."""

    def __init__(self) -> None:
        self.factory = DockerContainerFactory()
        self.made: list[Container] = []

    def __call__(self, spec: ContainerSpec) -> Container:
        self.made.append(self.factory(spec))
        return self.made[-1]

    def exists(self, engine: docker.DockerClient) -> list[bool]:
        """Of each, whether the engine has it."""
        found = []
        for box in self.made:
            try:
                engine.api.inspect_container(box.container_name)  # type: ignore[attr-defined]
                found.append(True)
            except NotFound:
                found.append(False)
        return found


async def kind_of(spec: ContainerSpec) -> str:
    return str(spec.env)


async def filled(pool: WarmPool, count: int) -> None:
    async with asyncio.timeout(SOON_SEC):
        while pool.ready != count:  # noqa: ASYNC110 (the pool tells nobody)
            await asyncio.sleep(0.02)


async def host_name(box: Container) -> str:
    return (await box.exec("cat /etc/hostname")).output


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
async def pool(make: Maker) -> AsyncIterator[WarmPool]:
    pool = WarmPool(make, ahead=1, kind_of=kind_of)
    yield pool
    await pool.close()


async def test_the_next_of_a_kind_is_there_already(pool: WarmPool, make: Maker) -> None:
    async with pool.container(SPEC) as first:
        await filled(pool, 1)
        async with pool.container(replace(SPEC, name="another")) as second:
            assert await host_name(second) == await host_name(make.made[1])
            assert await host_name(second) != await host_name(first)
            assert second.image == SPEC.docker_image
            assert (await second.exec("echo $WHICH")).output == "one\n"
            await filled(pool, 1)  # it was replaced
            assert len(make.made) == 3


@pytest.mark.nightly
async def test_another_kind_is_not_handed_out(pool: WarmPool) -> None:
    async with pool.container(SPEC):
        await filled(pool, 1)
        async with pool.container(replace(SPEC, env={"WHICH": "two"})) as other:
            assert (await other.exec("echo $WHICH")).output == "two\n"
            await filled(pool, 2)


@pytest.mark.nightly
async def test_a_dead_one_is_dropped_and_replaced(pool: WarmPool, make: Maker, engine: docker.DockerClient) -> None:
    async with pool.container(SPEC):
        await filled(pool, 1)
        await asyncio.to_thread(engine.api.kill, make.made[1].container_name)  # type: ignore[attr-defined]
        async with pool.container(SPEC) as box:
            assert (await box.exec("echo alive")).output == "alive\n"
            assert len(make.made) >= 3
            await filled(pool, 1)
    assert await asyncio.to_thread(make.exists, engine) == [False, False, False, True]


async def test_closing_stops_what_waits(pool: WarmPool, make: Maker, engine: docker.DockerClient) -> None:
    async with pool.container(SPEC):
        await filled(pool, 1)
        await pool.close()
        assert await asyncio.to_thread(make.exists, engine) == [True, False]
        await pool.close()
        async with pool.container(SPEC):  # it can be used again
            await filled(pool, 1)


async def test_closing_while_one_is_being_started(pool: WarmPool, make: Maker, engine: docker.DockerClient) -> None:
    async with pool.container(SPEC):
        async with asyncio.timeout(SOON_SEC):
            while len(make.made) < 2:  # noqa: ASYNC110 (the pool tells nobody)
                await asyncio.sleep(0)
        await pool.close()
        assert await asyncio.to_thread(make.exists, engine) == [True, False]


@pytest.mark.nightly
def test_what_waits_ends_with_the_event_loop(make: Maker, engine: docker.DockerClient) -> None:
    pool = WarmPool(make, ahead=2, kind_of=kind_of)

    async def play() -> None:
        async with pool.container(SPEC) as box:
            assert (await box.exec("echo played")).output == "played\n"
            await filled(pool, 2)

    asyncio.run(play())
    assert make.exists(engine) == [False, False, False]
    asyncio.run(play())  # on another loop
    assert make.exists(engine) == [False] * 6


@pytest.mark.nightly
async def test_kinds_asked_for_long_ago_make_room(
    monkeypatch: pytest.MonkeyPatch, pool: WarmPool, make: Maker, engine: docker.DockerClient
) -> None:
    monkeypatch.setattr(warm_pool, "MAX_WARM", 1)
    async with pool.container(SPEC):
        await filled(pool, 1)
        async with pool.container(replace(SPEC, env={})):
            async with asyncio.timeout(SOON_SEC):
                while len(make.made) < 4 or pool.ready != 1:  # noqa: ASYNC110 (the pool tells nobody)
                    await asyncio.sleep(0.02)
            assert await asyncio.to_thread(make.exists, engine) == [True, False, True, True]


@pytest.mark.nightly
async def test_a_failure_to_start_ahead_is_told_once_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    factory, asked = DockerContainerFactory(), 0

    def fails_from_the_second_on(spec: ContainerSpec) -> Container:
        nonlocal asked
        asked += 1
        return factory(spec if asked in (1, 3) else replace(spec, docker_image="localhost:1/no/such:image"))

    pool = WarmPool(fails_from_the_second_on, ahead=1, kind_of=kind_of)
    with caplog.at_level(logging.WARNING):
        async with pool.container(SPEC):
            async with asyncio.timeout(SOON_SEC):
                while not caplog.records:  # noqa: ASYNC110 (the pool tells nobody)
                    await asyncio.sleep(0.02)
            async with pool.container(SPEC) as box:
                assert (await box.exec("echo fine")).output == "fine\n"
        await pool.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Stopped starting containers ahead for warm"
    ]
    assert asked == 3


async def test_it_is_started_once_and_stopped_as_often_as_one_likes(pool: WarmPool) -> None:
    box = pool.container(SPEC)
    with pytest.raises(ContainerDiedError, match="has not been started"):
        await box.exec("true")
    await box.start()
    with pytest.raises(ContainerStartError, match="started once"):
        await box.start()
    await box.stop()
    await box.stop()
    with pytest.raises(ContainerDiedError):
        await box.exec("true")
    never = pool.container(SPEC)
    await never.stop()
    with pytest.raises(ContainerStartError, match="started once"):
        await never.start()


async def test_the_factory_keeps_a_pool(engine: docker.DockerClient) -> None:
    factory, task = DockerContainerFactory(warm=1), f"kept warm {os.getpid()}"
    name = f"ares-exp-{task.replace(' ', '-')}"

    def there() -> list[str]:
        return [one.name for one in engine.containers.list(filters={"name": name}, ignore_removed=True)]

    async def until(count: int) -> None:
        async with asyncio.timeout(SOON_SEC):
            while len(await asyncio.to_thread(there)) != count:  # noqa: ASYNC110 (it happens in the engine)
                await asyncio.sleep(0.02)

    async with factory(ContainerSpec(task, docker_image=SPEC.docker_image)) as box:
        assert (await box.exec("echo cold")).output == "cold\n"
        await until(2)
    await until(1)
    await factory.close()
    await until(0)
