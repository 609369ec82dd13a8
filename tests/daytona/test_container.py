"""The life of a sandbox: how it is requested, kept and removed, and how failures are cleaned up."""

import asyncio
import contextlib
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec, Mount
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import (
    ContainerAuthorizationError,
    ContainerDiedError,
    ContainerError,
    ContainerQuotaError,
    ContainerRateLimitError,
    PreflightError,
    SnapshotMismatchError,
)
from tests.daytona.conftest import tasks
from tests.daytona.emulator import Emulator, Fault
from tests.daytona.emulator.faults import FaultKind
from tests.leaks import until

pytestmark = [pytest.mark.local, pytest.mark.once]

SPEC = ContainerSpec("t", docker_image="debian:12.9")
CREATION = "/api/sandbox$"
FULL = {"message": "Total CPU limit exceeded. Maximum allowed: 10.\nTo increase concurrency limits, upgrade."}


async def nothing_is_left(emulator: Emulator, factory: DaytonaContainerFactory) -> None:
    """No sandbox, no connection of the factory, no task."""
    await until(lambda: not emulator.sandboxes)
    assert not factory._connections._of_loop
    await until(lambda: not tasks())


def posted(emulator: Emulator, what: str) -> list[Any]:
    return [one.body for one in emulator.requests if one.method == "POST" and one.path.endswith(what)]


async def test_capture_starts_another_sandbox(
    emulator: Emulator, factory: DaytonaContainerFactory, tmp_path: Path
) -> None:
    program, target = tmp_path / "tool" / "bin" / "run", f"/opt/{tmp_path.name}"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\nCOPY Dockerfile /d\nENV A=1\nWORKDIR /app\n")
    spec = ContainerSpec("t", context_dir=tmp_path, mounts=(Mount(tmp_path / "tool", target, "d1"),))
    factory.check_snapshots()
    objects = ObjectStore(tmp_path / "objects")
    async with factory(spec) as box:
        assert (await box.exec(f"{target}/bin/run; echo mine >/mine; rm /d")).output == "ran\n"
        captures = [box.capture_changes(objects) for _ in range(2)]  # type: ignore[attr-defined]
        delta, other = await asyncio.gather(*captures)  # the service refuses a second one at the same time
        assert delta.base != other.base
        assert (await box.exec("cat /mine")).output == "mine\n"
    async with factory(replace(spec, changes=StoredChanges(delta, objects))) as box:
        found = await box.exec(f"cat /mine; ls /d; echo $A; pwd; ls {target}; ls -d /tmp/.ares_exp-*/ | wc -l")
        assert found.output == "mine\nls: cannot access '/d': No such file or directory\n1\n/app\nbin\n1\n"
    elsewhere = StoredChanges(Delta("docker:sha256:0", {}), objects)
    with pytest.raises(SnapshotMismatchError, match="another backend"):
        await factory(replace(spec, changes=elsewhere)).start()


@pytest.mark.parametrize(("fault", "error", "said"), [
    (Fault("status", "POST", CREATION, status=429, retry_after=900), ContainerRateLimitError, "concurrency="),
    (Fault("status", "POST", CREATION, status=400, body=FULL), ContainerQuotaError, "CPU limit exceeded.*concurrency="),
    (Fault("status", status=401, times=None), ContainerAuthorizationError, "DAYTONA_API_KEY"),
    (Fault("status", path="/process/execute", status=403, times=None), ContainerAuthorizationError, "returned 403"),
    (Fault("lost", path="/process/execute"), ContainerDiedError, "ares-exp-t-"),
    (
        Fault("status", path="/process/execute", status=200, body={"exitCode": 1, "result": "no dd"}, times=None),
        ContainerError,
        "No shell could be started.*no dd",
    ),
], ids=["rate-limit", "quota", "key", "refused-command", "lost", "no-shell"])  # fmt: skip
async def test_rejected_start_leaves_no_sandbox(
    emulator: Emulator, fault: Fault, error: type[Exception], said: str
) -> None:
    factory = DaytonaContainerFactory()
    emulator.faults.add(fault)
    box = factory(SPEC)
    with pytest.raises(error, match=said) as caught:
        await box.start()
    assert emulator.api_key not in str(caught.value)
    emulator.faults.clear()
    with pytest.raises(ContainerDiedError):
        await box.exec("true")
    await nothing_is_left(emulator, factory)


async def test_missing_credentials_are_a_preflight_error(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY")
    factory = DaytonaContainerFactory()
    for start in (factory.preflight(), factory(SPEC).start()):
        with pytest.raises(PreflightError, match="DAYTONA_API_KEY"):
            await start
    assert not emulator.requests


async def test_cancelled_start_leaves_no_sandbox(emulator: Emulator) -> None:
    """Before every other one of its requests is acted upon, and after the others."""
    factory = DaytonaContainerFactory()
    for skip in itertools.count():
        kind: FaultKind = "status_after" if skip % 2 else "slow"
        fault = emulator.faults.add(Fault(kind, skip=skip, seconds=0.1, status=503))
        box = factory(SPEC)
        starting = asyncio.create_task(box.start())
        met = asyncio.create_task(fault.met.wait())
        await asyncio.wait({starting, met}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        met.cancel()
        starting.cancel()
        emulator.faults.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        if fault.hits == 0:
            break
        await nothing_is_left(emulator, factory)
    assert skip >= 5
    await box.stop()
    await nothing_is_left(emulator, factory)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "next to others"])
async def test_stop_during_start_leaves_no_sandbox(emulator: Emulator, others: bool) -> None:
    factory = DaytonaContainerFactory()
    async with contextlib.AsyncExitStack() as stack:
        if others:  # which keep the connection open
            await stack.enter_async_context(factory(SPEC))
        for path in (CREATION, "GET", "/process/execute"):
            fault = Fault("slow", "GET", "/api/sandbox/", seconds=0.2) if path == "GET" else None
            slow = emulator.faults.add(fault or Fault("slow", "POST", path, seconds=0.2))
            box = factory(SPEC)
            assert isinstance(box, DaytonaContainer)
            starting = asyncio.create_task(box.start())
            await asyncio.wait_for(slow.met.wait(), 60)
            await box.stop()
            with pytest.raises(ContainerDiedError, match="stopped"):
                await starting
            emulator.faults.clear()
            await until(lambda: box.sandbox_name not in emulator.service.by_name)  # noqa: B023
            with pytest.raises(ContainerDiedError):
                await box.exec("true")
    await nothing_is_left(emulator, factory)


async def test_cancelled_stop_still_removes_the_sandbox(emulator: Emulator) -> None:
    factory = DaytonaContainerFactory()
    box = factory(SPEC)
    await box.start()
    slow = emulator.faults.add(Fault("slow", "DELETE", seconds=0.2))
    stopping = asyncio.create_task(box.stop())
    await asyncio.wait_for(slow.met.wait(), 60)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await nothing_is_left(emulator, factory)


async def test_stop_survives_a_lost_or_unreachable_sandbox(
    emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    factory = DaytonaContainerFactory()
    box = factory(SPEC)
    await box.start()
    emulator.lose(next(iter(emulator.sandboxes)))
    await box.stop()
    await box.stop()
    assert not caplog.records
    async with factory(SPEC):
        emulator.faults.add(Fault("status", "DELETE", status=403))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "remains until its TTL ends" in caplog.text
    [left] = emulator.sandboxes
    emulator.lose(left)
    await nothing_is_left(emulator, factory)


@pytest.mark.nightly
def test_factory_works_in_several_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_JWT_TOKEN", raising=False)
    factory = DaytonaContainerFactory()

    async def run() -> str:
        async with Emulator() as emulator:
            monkeypatch.setenv("DAYTONA_API_KEY", emulator.api_key)
            monkeypatch.setenv("DAYTONA_API_URL", emulator.url)
            await factory.preflight()
            async with factory(SPEC) as one, factory(SPEC) as two:
                results = await asyncio.gather(one.exec("echo one"), two.exec("echo two"))
            await nothing_is_left(emulator, factory)
            return "".join(result.output for result in results)

    assert [asyncio.run(run()) for _ in range(2)] == ["one\ntwo\n"] * 2


async def test_requests_contain_variables_and_network(emulator: Emulator) -> None:
    factory = DaytonaContainerFactory(env={"A": "factory", "B": "factory"}, allowed_hosts=["pypi.org"])
    allowed = NetworkPolicy("allowlist", frozenset({"example.org"}))
    spec = replace(
        SPEC, env={"A": "task"}, network=NO_NETWORK, phase_networks=frozenset({PUBLIC, allowed}), lifetime_sec=600,
        cpus=0.5, memory_mb=1536, storage_mb=5000,
    )  # fmt: skip
    async with factory(spec) as box:
        [asked] = posted(emulator, "/api/sandbox")
        assert asked["buildInfo"] == {"dockerfileContent": "FROM debian:12.9\n"}
        assert (asked["cpu"], asked["memory"], asked["disk"]) == (1, 2, 5)
        assert not {"networkAllowList", "snapshot", "gpu"} & asked.keys()
        assert (asked["ttlMinutes"], asked["autoStopInterval"], asked["autoDeleteInterval"]) == (20, 20, 0)
        assert (asked["user"], asked["env"]) == ("root", {"A": "task", "B": "factory"})
        assert (asked["domainAllowList"], "networkBlockAll" in asked) == ("pypi.org", False)
        assert asked["labels"]["ares_exp.run"]
        assert (await box.exec("echo $A $B")).output == "task factory\n"
        for policy in (NO_NETWORK, PUBLIC, PUBLIC, allowed, NO_NETWORK):
            await box.set_network(policy)
        assert [
            (sent["networkBlockAll"], sent.get("networkAllowList"), sent.get("domainAllowList"))
            for sent in posted(emulator, "/network-settings")
        ] == [(False, "", ""), (False, "", "example.org,pypi.org"), (False, "", "pypi.org")]


async def test_failed_network_switch_is_an_error(emulator: Emulator) -> None:
    spec = replace(SPEC, network=NO_NETWORK, phase_networks=frozenset({PUBLIC}))
    async with DaytonaContainerFactory()(spec) as box:
        refusal = emulator.faults.add(Fault("status", path="network-settings", status=403))
        with pytest.raises(ContainerAuthorizationError, match="network of sandbox"):
            await box.set_network(PUBLIC)
        assert refusal.hits == 1
        await box.set_network(NO_NETWORK)  # it is not known whether it still is
        assert [sent["networkBlockAll"] for sent in posted(emulator, "/network-settings")] == [False, True]
        emulator.lose(next(iter(emulator.sandboxes)), "error")
        with pytest.raises(ContainerDiedError):
            await box.set_network(PUBLIC)


async def test_named_snapshot_of_the_service_is_used(emulator: Emulator) -> None:
    factory = DaytonaContainerFactory(snapshot="team/base")
    assert "not used" in factory.check(SPEC)[0]
    with pytest.raises(ContainerError, match="Snapshot team/base not found"):
        await factory(SPEC).start()
    async with DaytonaContainerFactory()(SPEC) as origin:
        await origin.exec("echo kept >/kept")
        [sandbox] = emulator.sandboxes.values()
        emulator.service.take_snapshot(sandbox, "team/base")
        await until(lambda: "team/base" in emulator.service.snapshots)
    async with factory(SPEC) as box:
        assert (await box.exec("cat /kept")).output == "kept\n"
        assert box.image == "team/base"


DOCKERFILE = """\
FROM debian:bookworm-slim
ENV FIRST=1 PATH=/app/bin:$PATH
ARG BUILT=before
RUN useradd --uid 4321 agent
WORKDIR /app
SHELL ["/bin/bash", "-ec"]
COPY tool.sh data ./
COPY --chmod=750 tree tree
ARG LATER=argument
RUN mkdir -p bin && install -m 755 tool.sh bin/tool && [[ -x bin/tool ]] && tool >shown && chown -R agent: /app
ENV SECOND=${FIRST}2
USER agent
RUN echo $LATER $(id -un) >data
WORKDIR deeper
"""
SEEN = "pwd; id -un; echo $FIRST $SECOND; tool; cd /app; ls -lnR --time-style=+ .; cat data shown tree/*/c"


@pytest.mark.root
async def test_dockerfile_with_files_matches_its_build(emulator: Emulator, tmp_path: Path) -> None:
    """The service builds what needs no file, and has no object store; the rest is done in the sandbox."""
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho tool of $(id -un)\n")
    (tmp_path / "data").write_text("data\n")
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "c").write_text("of the tree\n")
    (tmp_path / "tree" / "key.pem").write_text("secret\n")
    (tmp_path / ".dockerignore").write_text("**/*.pem\n")
    spec = ContainerSpec("t", context_dir=tmp_path, network=NO_NETWORK)
    seen = []
    for factory in (LocalContainerFactory(), DaytonaContainerFactory()):
        async with factory(spec) as box:
            seen.append((await box.exec(SEEN, shell="bash -c")).output)
            await box.upload(tmp_path / "data", "relative")
            seen[-1] += (await box.exec("ls -ln --time-style=+", user="root", shell="bash -c")).output
            cut_off = [sandbox.is_cut_off for sandbox in emulator.sandboxes.values()]
    [asked] = posted(emulator, "/api/sandbox")
    assert asked["buildInfo"]["dockerfileContent"] == DOCKERFILE.partition("COPY")[0]
    assert "networkBlockAll" not in asked
    assert cut_off == [True]
    assert seen[0] == seen[1]
    assert seen[0].startswith("/app/deeper\nagent\n1 12\ntool of agent\n")
    assert "argument agent\ntool of root\nof the tree\n" in seen[0]
    assert "relative" in seen[0]
    assert "key.pem" not in seen[0]


async def test_sandbox_without_keepalive_ends_after_its_ttl(emulator: Emulator) -> None:
    """The runner's machine is disconnected: the service removes the sandbox, and a command reports it."""
    factory = DaytonaContainerFactory(ttl_min=30)
    async with factory(SPEC) as box:
        running = asyncio.create_task(box.exec("sleep 100"))
        await box.exec("true")
        emulator.service.minute = 0.01
        [sandbox] = emulator.sandboxes.values()
        emulator.service.set_ttl(sandbox, sandbox.ttl)
        with pytest.raises(ContainerDiedError, match="ares-exp-t-"):
            await running
    await nothing_is_left(emulator, factory)


async def test_key_is_never_shown(
    emulator: Emulator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    key = emulator.api_key
    factory = DaytonaContainerFactory()
    texts = [repr(factory.options)]
    for body in (f"no such key: {key}", {"message": f"no such key: {key}", "code": key}):
        fault = emulator.faults.add(Fault("status", status=401, body=body, times=None))
        for asked in (factory.preflight(), factory(SPEC).start()):
            with pytest.raises((ContainerAuthorizationError, PreflightError)) as caught:
                await asked
            assert "***" in str(caught.value)
            texts.append(str(caught.value))
        fault.times = 0
    async with factory(SPEC) as box:
        texts.append((await box.exec("env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'")).output)
        emulator.faults.add(Fault("status", "DELETE", status=403, body={"message": f"not with {key}"}))
    texts += [caplog.text, repr(box), repr(emulator.requests)]
    assert "not with ***" in caplog.text
    assert not [text for text in texts if key in text]
    emulator.lose(next(iter(emulator.sandboxes)))
