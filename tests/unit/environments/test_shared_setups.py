"""Set-ups that attempts at a task share: what they start from, when it is not shared, and what is left of it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerFactoryBase, ContainerSpec
from ares_exp.containers.daytona import DaytonaContainerFactory
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.owned_directory import find_short_lived
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.shared_setups import SharedSetups, check_sharing
from ares_exp.errors import ConfigError, StepSetupError
from tests.unit.environments.snapshots import last_message, run
from tests.unit.environments.steps import DOCKERFILE, TWO_STEPS, MakeSteps

DRAW = "cat /proc/sys/kernel/random/uuid"
SETUP = f"#!/bin/sh\nset -e\n{DRAW} > /work/drawn\nrm /etc/debian_version\n"
LOOK = run("cat /work/drawn; ls /etc/debian_version; stat -c '%n %a %s' /work/* /logs/*; ps ax >/dev/null; ls /tmp")
EACH = [
    pytest.param(LocalContainerFactory, marks=pytest.mark.local),
    pytest.param(DockerContainerFactory, marks=pytest.mark.docker),
]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory for temporary files, where shared set-ups are."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
async def setups() -> AsyncIterator[SharedSetups]:
    made = SharedSetups()
    yield made
    await made.close()
    assert [left.name for left in find_short_lived()] == []


Attempt = Callable[..., CodeEnvironment]


@pytest.fixture
def attempt(make_steps: MakeSteps, setups: SharedSetups) -> Attempt:
    """Makes the environment of an attempt at a task whose first step has a set-up script."""
    task: list[Any] = []

    def make(
        factory: ContainerFactoryBase,
        script: str = SETUP,
        *,
        toml: str = TWO_STEPS,
        dockerfile: str = DOCKERFILE,
        files: Mapping[str, str] | None = None,
        shared: SharedSetups | None = setups,
    ) -> CodeEnvironment:
        content = {"environment/Dockerfile": dockerfile, "steps/one/workdir/setup.sh": script}
        task[:] = task or [make_steps(toml, files={**content, **(files or {})})]
        return CodeEnvironment(
            task, container_factory=factory, code_agent_factory=ShellAgentFactory(), shared_setups=shared
        )

    return make


async def kept(factory: ContainerFactoryBase) -> list[str]:
    """What a backend holds for this process when there is no container."""
    found = await asyncio.to_thread(lambda: [*factory.find_leftovers()])
    mine = (f"process {os.getpid()}", f"process {os.getpid()} on {socket.gethostname()}")
    return [one.name for one in found if one.kind in ("directory", "image") and one.whose in mine]


async def seen(env: CodeEnvironment) -> str:
    """What the agent sees of what the set-up has left."""
    async with env:
        await env.reset()
        await env.step(LOOK)
        return last_message(env)


@pytest.mark.parametrize("backend", EACH)
async def test_attempts_start_from_one_setup(backend: Any, attempt: Attempt) -> None:
    dockerfile = f"{DOCKERFILE}RUN {DRAW} > /work/built\n"
    factory, look = backend(), run("cat /work/drawn /work/built")

    async def drawn(shared: bool) -> str:
        more = {} if shared else {"shared": None}
        async with attempt(factory, dockerfile=dockerfile, **more) as env:
            await env.reset()
            await env.step(look)
            return last_message(env)

    together = await asyncio.gather(*(drawn(True) for _ in range(3)))
    later = await drawn(True)
    assert {*together, later} == {later}
    assert await drawn(False) != later


@pytest.mark.parametrize("backend", EACH)
async def test_an_attempt_finds_what_it_would_find_otherwise(backend: Any, attempt: Attempt) -> None:
    script, factory = SETUP.replace(DRAW, "echo same"), backend()
    anew = await seen(attempt(factory, script, shared=None))
    assert "same" in anew
    assert "cannot access '/etc/debian_version'" in anew
    assert [await seen(attempt(factory, script)) for _ in range(2)] == [anew, anew]


@pytest.mark.parametrize("backend", EACH)
async def test_what_is_made_for_one_attempt_serves_the_later_ones(
    backend: Any, attempt: Attempt, setups: SharedSetups
) -> None:
    factory, before = backend(), await kept(backend())
    found = [await seen(attempt(factory)) for _ in range(2)]
    made = set(await kept(factory)) - {*before}
    assert len(made) == 1
    found.append(await seen(attempt(factory)))
    assert set(await kept(factory)) - {*before} == made
    assert len(set(found)) == 1
    await setups.close()
    assert set(await kept(factory)).isdisjoint(made)


@pytest.mark.docker
async def test_an_image_that_somebody_removed_is_made_again(attempt: Attempt) -> None:
    factory, before = DockerContainerFactory(), await kept(DockerContainerFactory())
    found = [await seen(attempt(factory)) for _ in range(2)]
    [image] = set(await kept(factory)) - {*before}
    await asyncio.to_thread(subprocess.run, ["docker", "rmi", image], stdout=subprocess.DEVNULL, check=True)
    found += [await seen(attempt(factory)) for _ in range(2)]
    assert len(set(found)) == 1


SPOIL = """
mv /work/dir /work/moved && echo spoiled > /work/moved/file; rm /work/gone; chmod 600 /work/mode
echo spoiled >> /work/name; cat /work/other; ln /work/mode /work/more; ls -lR --time-style=+ /work"""


@pytest.mark.parametrize("backend", EACH)
async def test_what_one_attempt_does_to_shared_files_no_other_sees(backend: Any, attempt: Attempt) -> None:
    make = "mkdir dir; touch dir/file gone mode; echo one > name; ln name other"
    factory, script = backend(), f"set -e\ncd /work\n{make}\n"

    async def played(**more: Any) -> tuple[str, str]:
        async with attempt(factory, script, **more) as env:
            await env.reset()
            await env.step(run("ls -lR --time-style=+ /work"))
            begun = last_message(env)
            await env.step(run(SPOIL))
            return begun, last_message(env)

    alone = await played(shared=None)
    assert "one\nspoiled\n" in alone[1]
    assert await asyncio.gather(*(played() for _ in range(3))) == [alone] * 3
    assert await played() == alone


@pytest.mark.local
async def test_a_shared_directory_can_be_renamed(attempt: Attempt) -> None:
    """By the system call: programs that do not copy what cannot be renamed work, too."""
    factory, rename = LocalContainerFactory(), "import os; os.rename('/work/dir', '/work/moved')"
    for _ in range(2):
        async with attempt(factory, "mkdir -p /work/dir/inner\n") as env:
            await env.reset()
            await env.step(run(f'python3 -c "{rename}"; find /work/*'))
            assert "/work/moved\n/work/moved/inner" in last_message(env)


@pytest.mark.parametrize("backend", EACH)
async def test_a_snapshot_of_an_attempt_holds_what_was_shared(
    backend: Any, attempt: Attempt, setups: SharedSetups, store: Path, restore: Any
) -> None:
    factory = backend()
    await seen(attempt(factory))
    async with attempt(factory) as env:
        await env.reset()
        await env.step(LOOK)
        was = last_message(env)
        snapshot = await env.export_state(store)
    await setups.close()
    again = await restore(snapshot, container_factory=factory)
    await again.step(LOOK)
    assert last_message(again) == was


@pytest.mark.local
@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ("sleep 1000 &", "it left a process running: "),
        ("echo x > /dev/shm/file", "there are files in /dev/shm"),
        ("python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/work/socket')\"", "socket"),
    ],
)
async def test_a_setup_that_leaves_more_than_files_is_not_shared(
    attempt: Attempt, caplog: pytest.LogCaptureFixture, leaves: str, why: str
) -> None:
    factory = LocalContainerFactory()
    with caplog.at_level(logging.WARNING):
        found = [await seen(attempt(factory, f"{SETUP}{leaves}\n")) for _ in range(3)]
    assert len(set(found)) == 3
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("The set-up of steps is not shared: ")
    assert why in told


@pytest.mark.local
async def test_a_setup_that_fails_fails_every_attempt(attempt: Attempt) -> None:
    for _ in range(2):
        with pytest.raises(StepSetupError, match="gave exit code 3"):
            await attempt(LocalContainerFactory(), "exit 3\n").reset()


@pytest.mark.local
async def test_who_is_cancelled_while_it_sets_up_leaves_that_to_the_next(attempt: Attempt) -> None:
    factory = LocalContainerFactory()
    first, second, third = (attempt(factory) for _ in range(3))
    began = asyncio.Event()

    class _Container(LocalContainer):
        async def start(self) -> None:
            began.set()
            await asyncio.Event().wait()

    class _Factory(LocalContainerFactory):
        def __call__(self, spec: ContainerSpec) -> LocalContainer:
            return _Container(spec, share_network=False)

    hanging = attempt(_Factory())
    async with first, second, third, hanging:
        begun = asyncio.ensure_future(hanging.reset())
        await began.wait()
        waiting = [asyncio.ensure_future(env.reset()) for env in (first, second, third)]
        begun.cancel()
        await asyncio.gather(*waiting)
        found = set()
        for env in (first, second, third):
            await env.step(LOOK)
            found.add(last_message(env))
    assert len(found) == 1


@pytest.mark.local
async def test_what_cannot_be_restored_costs_no_attempt(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    factory = LocalContainerFactory()
    first = await seen(attempt(factory))
    [directory] = [Path(left.name) for left in find_short_lived()]
    for part in (directory / "objects").rglob("*"):
        if part.is_file():
            part.write_bytes(b"damaged")
    assert await seen(attempt(factory)) != first
    assert "is not shared: no container starts with it" in caplog.text


HEALTH = "[steps.healthcheck]\ncommand = 'true'\n"


@pytest.mark.local
@pytest.mark.parametrize(
    ("toml", "why"),
    [
        (TWO_STEPS.replace("'one'\n", f"'one'\n{HEALTH}"), "its health check waits for more than files"),
        (f"{TWO_STEPS}[metadata]\nshare_setup = false\n", "its task.toml says so"),
    ],
)
async def test_a_task_that_is_not_shared_is_named_before_the_run(
    make_steps: MakeSteps, attempt: Attempt, toml: str, why: str
) -> None:
    factory = LocalContainerFactory()
    assert len({await seen(attempt(factory, toml=toml)) for _ in range(2)}) == 2
    [told] = check_sharing(factory, [make_steps(toml)])
    assert told.startswith(f"steps: its set-up is not shared, because {why}")


def test_a_compose_file_is_not_shared(make_steps: MakeSteps) -> None:
    compose = "services:\n  main:\n    image: debian:bookworm-slim\n"
    task = make_steps(files={"environment/docker-compose.yaml": compose})
    [told] = check_sharing(DockerContainerFactory(), [task])
    assert told.endswith("because its compose file starts several containers")


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (lambda: DaytonaContainerFactory(), "got container=daytona"),
        (lambda: DockerContainerFactory(keep_image=False), "container.keep_image=false"),
    ],
)
def test_backends_that_cannot_share_are_refused(factory: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_sharing(factory(), [])
