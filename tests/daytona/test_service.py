"""Requests by the real SDK to a service that misbehaves; and what a connection leaves behind."""

import ast
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import daytona
import pytest
from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromSnapshotParams

from ares_exp import errors
from ares_exp.containers.daytona import factory
from ares_exp.containers.daytona.service import FEW_TRIES, Credentials, DaytonaService
from tests.daytona.conftest import tasks
from tests.daytona.emulator import Emulator, Fault

pytestmark = pytest.mark.local


async def look(client: AsyncDaytona) -> AsyncSandbox:
    """A GET for a missing sandbox: if it gets through, the response is 404."""
    return await client.get("x")


@pytest.fixture
async def sandbox(service: DaytonaService) -> AsyncSandbox:
    return await service.client.create(CreateSandboxFromSnapshotParams())


def activity(sandbox: AsyncSandbox) -> Callable[[AsyncDaytona], Awaitable[None]]:
    """A POST: the SDK never sends one again by itself."""
    return lambda _: sandbox.refresh_activity()


@pytest.mark.parametrize(("times", "retry_after", "at_least_sec"), [(1, 1, 1.0), (2, None, 0.0)])
async def test_retry_after_delays_the_next_request(
    emulator: Emulator, service: DaytonaService, times: int, retry_after: int | None, at_least_sec: float
) -> None:
    emulator.faults.add(Fault("status", status=429, retry_after=retry_after, times=times))
    started = asyncio.get_running_loop().time()
    with pytest.raises(errors.ContainerDiedError):
        await service.call("The sandbox x", look, repeatable=False)
    assert asyncio.get_running_loop().time() - started >= at_least_sec
    assert [request.status for request in emulator.requests] == [*[429] * times, 404]


async def test_retry_after_above_the_timeout_fails(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("status", status=429, retry_after=600))
    with pytest.raises(errors.ContainerRateLimitError, match=r"returned 429: .*concurrency=") as caught:
        await service.call("The sandbox x", look)
    assert (caught.value.status, caught.value.retry_after_sec, len(emulator.requests)) == (429, 600, 1)


@pytest.mark.parametrize("outage", [Fault("status", status=503, times=2), Fault("drop")], ids=["503", "dropped"])
async def test_outage_is_waited_out(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox, outage: Fault
) -> None:
    emulator.faults.add(outage)
    await service.call("The sandbox", activity(sandbox))
    assert outage.times == 0


async def test_request_with_possible_effect_is_not_repeated(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    for kind in ("status_after", "drop_after"):
        fault = emulator.faults.add(Fault(kind, times=None))  # type: ignore[arg-type]
        with pytest.raises(errors.ContainerServiceUnavailableError, match="state of the service"):
            await service.call("The sandbox", activity(sandbox), repeatable=False)
        assert fault.hits == 1
        emulator.faults.clear()


async def test_server_error_is_retried_a_few_times(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    defect = emulator.faults.add(Fault("status", status=500, times=None))
    with pytest.raises(errors.ContainerServiceUnavailableError, match="The sandbox: the Daytona service returned 500:"):
        await service.call("The sandbox", activity(sandbox))
    assert defect.hits == FEW_TRIES


@pytest.fixture
def closed_port() -> int:
    """A port without a listener, below the range from which free ports are chosen."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")


async def test_failed_connection_is_always_retried(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    """Also a request that must not be repeated: the service never received it."""
    monkeypatch.setenv("DAYTONA_API_URL", f"http://127.0.0.1:{closed_port}/api")
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_of_a_service_that_is_not_there")
    service, again = DaytonaService(Credentials.from_environment(), base_sec=0.05), asyncio.Event()
    tries = 0

    async def request(client: AsyncDaytona) -> AsyncSandbox:
        nonlocal tries
        tries += 1
        if tries == 2:
            again.set()
        return await look(client)

    asking = asyncio.ensure_future(service.call("The sandbox x", request, repeatable=False))
    await again.wait()
    async with Emulator(port=closed_port):
        with pytest.raises(errors.ContainerAuthorizationError):  # which knows another key
            await asking
    with pytest.raises(errors.ContainerServiceUnavailableError, match=r"(be asked|no response).*DAYTONA_API_URL"):
        await service.call("The sandbox x", look, timeout_sec=0.5)
    await service.close()


async def test_service_that_fails_is_unreachable(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    made = factory.DaytonaContainerFactory()
    await made.check_reachable()
    monkeypatch.setattr(factory, "_ANSWER_SEC", 1.0)
    emulator.faults.add(Fault("status", status=503, times=None))
    with pytest.raises(
        errors.UnreachableError, match=r"The service: the Daytona service returned 503: .* DAYTONA_API_URL"
    ):
        await made.check_reachable()


async def test_missing_response_times_out(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("slow", seconds=1))
    with pytest.raises(errors.ContainerServiceUnavailableError, match=r"The sandbox x: no response .* within 0\.3 s"):
        await service.call("The sandbox x", look, timeout_sec=0.3)


async def test_invalid_response_is_a_service_error(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("status", status=200, body="<html>maintenance</html>"))
    with pytest.raises(errors.ContainerServiceError, match="The sandbox x: ") as caught:
        await service.call("The sandbox x", look)
    assert type(caught.value) is errors.ContainerServiceError
    assert len(emulator.requests) == 1


async def test_token_is_sent_with_its_organisation(emulator: Emulator) -> None:
    service = DaytonaService(Credentials(emulator.url, jwt_token=emulator.api_key, organization_id="org"))
    with pytest.raises(errors.ContainerDiedError):
        await service.call("The sandbox x", look)
    assert service.client._api_client.default_headers["X-Daytona-Organization-ID"] == "org"
    await service.close()


async def test_is_gone_detects_lost_and_stopped_sandboxes(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    assert not await service.is_gone(sandbox)
    emulator.lose(sandbox.id)
    with pytest.raises(errors.ContainerDiedError):
        await service.call("The sandbox", lambda _: sandbox.process.exec("true"))
    assert await service.is_gone(sandbox)
    stopped = await service.client.create(CreateSandboxFromSnapshotParams())
    emulator.lose(stopped.id, "stopped")
    assert await service.is_gone(stopped)
    emulator.faults.add(Fault("status", status=403))
    assert not await service.is_gone(stopped), "a forbidden lookup says nothing"


async def test_env_files_of_the_working_directory_are_ignored(
    emulator: Emulator, service: DaytonaService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ("API_URL=http://127.0.0.1:1", "TARGET=elsewhere", "OTEL_ENABLED=true", "JWT_TOKEN=x")
    broken = ("HAPPY_EYEBALLS_DELAY=nonsense", "USE_DEPRECATED_POLLING=true", "EXPERIMENTAL_OTEL_ENABLED=true")
    for name in (".env", ".env.local"):
        (tmp_path / name).write_text("".join(f"DAYTONA_{line}\n" for line in (*settings, *broken)))
    monkeypatch.chdir(tmp_path)
    await service.client.create(CreateSandboxFromSnapshotParams())
    assert "target" not in emulator.requests[0].body
    assert service.client._tracer_provider is None


async def test_closed_connection_leaves_no_tasks(emulator: Emulator, service: DaytonaService) -> None:
    """Nor a handler: the SDK's event stream has one of SIGINT, which cancels every task and stops the loop."""
    before, handler = tasks(), signal.getsignal(signal.SIGINT)
    sandbox = await service.client.create(CreateSandboxFromSnapshotParams())
    await sandbox.delete(wait=True)
    assert signal.getsignal(signal.SIGINT) is handler
    client = service.client
    await service.close()
    await service.close()
    assert tasks() <= before
    assert client._shared_session.session.closed
    with pytest.raises(errors.ContainerServiceError, match="has been closed"):
        await service.call("The sandbox x", look)


def test_import_does_not_load_the_sdk() -> None:
    modules = ("service", "factory", "failures", "sandbox_request")
    imports = "; ".join(f"import ares_exp.containers.daytona.{name}" for name in modules)
    script = f"import sys; {imports}; print({{'daytona', 'aiohttp', 'opentelemetry'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_only_public_sdk_names_are_used() -> None:
    for path in Path(factory.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("daytona"):
                assert node.module == "daytona", (path.name, node.module)
                assert {one.name for one in node.names} <= set(daytona.__all__), path.name
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name), (path.name, node.lineno)
                assert node.value.id == "self", (path.name, node.lineno)
