"""The connection to a Docker engine: API calls, which block in threads, and byte streams on the event loop.

`Capabilities` are the features of an engine, read from its response to `GET /info`. They determine which limits it can
enforce.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar
from urllib.parse import urlsplit

from ares_exp.cancellation import finish, result_of
from ares_exp.containers.container import ContainerSpec
from ares_exp.errors import PreflightError, UnsupportedTaskError

if TYPE_CHECKING:
    from docker import APIClient
    from requests import Response

CALL_TIMEOUT_SEC = 120.0
"""Time limit for one response of the engine. Image builds and pulls have the container's start limit instead."""

INQUIRY_TIMEOUT_SEC = 10.0
"""Time limit for requests that take a healthy engine milliseconds, so that a hanging engine is detected soon."""

PODMAN_SOCKET = "/podman/podman.sock"
"""Last part of the paths of Podman's sockets. It is the same for the system's socket and each user's socket."""

Pool = Literal["calls", "starts", "removals", "transfers"]
"""Kinds of calls. Each kind has its own threads, so that quick calls do not wait for slow calls of another kind."""

STREAM_CHUNK_BYTES = 256 * 1024
"""Maximum size of one read from a stream of the engine, and the limit of its reader."""

_THREADS: dict[Pool, int] = {"calls": 8, "starts": 16, "removals": 8, "transfers": 8}
_T = TypeVar("_T")


class EngineError(Exception):
    """The engine returned an error. `status` is the HTTP status, or 0 if there was no response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Engine:
    """The Docker engine at `host`. `api` is docker-py's client, which is safe to use from several threads."""

    host: str
    api: APIClient
    capabilities: Capabilities

    def ask(self, path: str, parameters: Mapping[str, str] | None = None, *, stream: bool = False) -> Response:
        """Sends a GET request with a short time limit. Returns the response, even with an error status. Blocking."""
        answer: Response = self.api.get(
            f"{self.api.base_url}/v{self.api.api_version}{path}",
            params=parameters,
            stream=stream,
            timeout=INQUIRY_TIMEOUT_SEC,
        )
        return answer

    async def hijack(self, path: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Posts a request, and returns its connection as a two-way byte stream to a process in a container.

        Raises `EngineError` if the engine returns an error, and `ConnectionError` if the engine is gone.
        """
        reader, writer = await self._connect()
        try:
            data = json.dumps(body).encode()
            head = f"POST /v{self.api.api_version}{path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            writer.write(data)
            answer = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)
            if answer[1] not in (b"101", b"200"):
                raise EngineError(_message(await reader.read(4096)), int(answer[1]))
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise ConnectionError("the engine closed the connection") from error
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.host)
        try:
            if url.scheme == "unix":
                return await asyncio.open_unix_connection(url.path, limit=STREAM_CHUNK_BYTES)
            return await asyncio.open_connection(url.hostname, url.port or 2375, limit=STREAM_CHUNK_BYTES)
        except OSError as error:
            raise ConnectionError(str(error)) from error


async def connect(host: str | None = None) -> Engine:
    """Connects to the engine at `host`. Default: `DOCKER_HOST`, the current Docker context, or the default socket.

    Raises `PreflightError` if the engine does not respond, or its address is not supported.
    """
    return await in_thread(lambda: connect_blocking(host))


async def why_unreachable(host: str | None) -> str:
    """Checks that the engine at `host` responds within `INQUIRY_TIMEOUT_SEC`. Returns the reason if not, or `""`.

    Opens a new connection for this, because an engine that is shutting down still responds on open connections.
    """

    def ask() -> str:
        address = address_of_engine(host)
        try:
            _probe(address)
            connect_blocking(host).ask("/_ping").raise_for_status()
        except engine_errors(PreflightError) as error:
            return f"The engine at {address} does not respond: {reason(error)}"
        return ""

    return await in_thread(ask, abandon=True)


async def in_thread(function: Callable[[], _T], *, pool: Pool = "calls", abandon: bool = False) -> _T:
    """Runs a blocking engine call in a thread of `pool`.

    If the caller is cancelled, it first waits for the call to end, so that the call creates no resource after a
    clean-up. Set `abandon` for read-only calls: the cancelled caller then does not wait.
    """
    future = asyncio.wrap_future(_executor(os.getpid(), pool).submit(function))
    try:
        return await result_of(future)
    except asyncio.CancelledError:
        if abandon:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieves the exception
        else:
            await finish(asyncio.wait_for(future, CALL_TIMEOUT_SEC))
        raise


def address_of_engine(host: str | None = None) -> str:
    """Returns the engine's address that `connect(host)` uses."""
    return host or _address(os.environ.get("DOCKER_HOST", ""))[0]


def engine_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Returns the types of the exceptions that engine calls raise, and `others`. Imports docker-py and requests."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return (*others, EngineError, DockerException, RequestException, HTTPError, OSError)


def connection_failure(error: BaseException | None) -> BaseException | None:
    """Returns the connection error in the chain of `error` and its causes, or `None` if the chain contains none."""
    import requests
    from urllib3.exceptions import HTTPError

    while error is not None and not isinstance(error, ConnectionError | requests.ConnectionError | HTTPError):
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """Returns the text of an error. For an error response of the engine, this is only the engine's message."""
    return str(getattr(error, "explanation", None) or error).strip().rstrip(".")


def _message(body: bytes) -> str:
    _, _, text = body.rpartition(b"\r\n\r\n")
    start = text.find(b"{")
    try:
        return str(json.JSONDecoder().raw_decode(text[start:].decode("utf-8", "replace"))[0]["message"])
    except (ValueError, KeyError, TypeError):
        return text.decode("utf-8", "replace").strip() or "no reason given"


_lock = threading.Lock()


def connect_blocking(host: str | None = None) -> Engine:
    """Connects to the engine, in the calling thread. See `connect`."""
    address = host or os.environ.get("DOCKER_HOST", "")
    with _lock:
        return _connected(os.getpid(), address, os.environ.get("DOCKER_CONTEXT", ""))


@functools.lru_cache(maxsize=4)
def _connected(pid: int, docker_host: str, context: str) -> Engine:
    """Connects to an engine, once per process and address. A forked process cannot use its parent's connections."""
    import docker

    host, secured = _address(docker_host)
    if secured or urlsplit(host).scheme not in ("unix", "tcp", "http"):
        raise PreflightError(
            f"Expected DOCKER_HOST to be unix:///path or tcp://host:port without TLS, got {host}"
            f"{' with TLS' if secured else ''}. Forward the engine's socket, for example with "
            "`ssh -L /tmp/docker.sock:/var/run/docker.sock host`, and set DOCKER_HOST=unix:///tmp/docker.sock."
        )
    try:
        _probe(host)
        api = docker.APIClient(base_url=host, timeout=CALL_TIMEOUT_SEC, max_pool_size=sum(_THREADS.values()))
        return Engine(host, api, capabilities_of(api.info()))
    except engine_errors() as error:
        raise PreflightError(_how_to_reach(host, error)) from error


def _how_to_reach(host: str, error: BaseException) -> str:
    if urlsplit(host).path.endswith(PODMAN_SOCKET):
        return (
            f"No Podman service responds at {host}: {reason(error)}. Start it (`systemctl --user start podman.socket`, "
            "as root without --user; or `podman system service --time=0`), or name another socket in CONTAINER_HOST."
        )
    if isinstance(error, PermissionError):
        return (
            f"This user may not use the Docker engine's socket {host}: {error.strerror}. Join the group that "
            "owns it (`sudo usermod -aG docker $USER`, then log in again), set DOCKER_HOST to another engine, "
            "or use container=local."
        )
    return (
        f"No Docker engine responds at {host}: {reason(error)}. Start it (`sudo systemctl start docker`), check that "
        "you may use its socket (`docker version`), set DOCKER_HOST to another engine, or use container=local."
    )


def _probe(host: str) -> None:
    """Opens and closes a connection, to fail with a short error. docker-py's error would be long and leak a socket."""
    url = urlsplit(host)
    if url.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(url.path)
    else:
        socket.create_connection((url.hostname or "", url.port or 2375), timeout=INQUIRY_TIMEOUT_SEC).close()


def _address(docker_host: str) -> tuple[str, bool]:
    """Returns the engine's address, and whether TLS is configured."""
    from docker import ContextAPI

    secured = bool(os.environ.get("DOCKER_TLS_VERIFY") or os.environ.get("DOCKER_CERT_PATH"))
    if docker_host:
        return docker_host, secured
    found: dict[str, Any] = ContextAPI.kwargs_from_context()
    name = os.environ.get("DOCKER_CONTEXT", "")
    if not found and name not in ("", "default"):
        raise PreflightError(
            f"DOCKER_CONTEXT is {name}, but there is no such Docker context. Choose a context "
            "from `docker context ls`, or unset it."
        )
    host = str(found.get("base_url") or "unix:///var/run/docker.sock").replace("http+unix://", "unix://")
    return host, "tls" in found


@functools.lru_cache(maxsize=4 * len(_THREADS))
def _executor(pid: int, pool: Pool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS[pool], thread_name_prefix=f"docker {pool}")


_MOUNTS = Path("/proc/self/mounts")

_MiB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of an engine. The default values assume an engine without optional features.

    `disk_quota` is true if the engine can limit the size of a container's files. `cdi_gpus` are the names of the
    engine's GPUs in the Container Device Interface.
    """

    cpus: int = 1
    disk_quota: bool = False
    nvidia_runtime: bool = False
    cdi_gpus: tuple[str, ...] = ()
    is_podman: bool = False

    @property
    def simultaneous_starts(self) -> int:
        """Maximum number of containers that start at the same time. More would only make each start slower."""
        return min(16, max(8, 2 * self.cpus))


def capabilities_of(info: Mapping[str, Any]) -> Capabilities:
    """Returns the features of an engine from its response to `GET /info`."""
    devices = info.get("DiscoveredDevices") or []
    return Capabilities(
        cpus=int(info["NCPU"]),
        disk_quota=has_disk_quota(info, _MOUNTS.read_text("utf-8", "replace") if _MOUNTS.exists() else ""),
        nvidia_runtime="nvidia" in (info.get("Runtimes") or {}),
        cdi_gpus=tuple(device["ID"] for device in devices if re.fullmatch(r"nvidia\.com/gpu=\d+", device["ID"])),
        is_podman="BuildahVersion" in info,
    )


def has_disk_quota(info: Mapping[str, Any], mounts: str) -> bool:
    """Returns whether the engine can limit the size of a container's files.

    The storage drivers btrfs and zfs always can. The driver overlay2 can only if its files are on XFS, mounted with
    project quotas. The engine does not report mount options, so they are read from this machine's `mounts`. A remote
    engine with overlay2 therefore counts as unable.
    """
    driver, status = info.get("Driver"), dict(info.get("DriverStatus") or [])
    if driver in ("btrfs", "zfs"):
        return True
    if driver != "overlay2" or status.get("Backing Filesystem") != "xfs":
        return False
    root, found = Path(info.get("DockerRootDir") or "/"), (Path("/"), "")
    for line in mounts.splitlines():
        point, kind, options = Path(line.split()[1]), *line.split()[2:4]
        if root.is_relative_to(point) and kind == "xfs" and len(point.parts) >= len(found[0].parts):
            found = (point, options)
    return bool({"prjquota", "pquota"} & set(found[1].split(",")))


def limits(spec: ContainerSpec, can: Capabilities, *, swap_mb: int, pids_limit: int) -> dict[str, Any]:
    """Returns arguments of docker-py's `create_host_config` for the limits of `spec` that the engine enforces."""
    found: dict[str, Any] = {"pids_limit": pids_limit}
    if spec.cpus is not None:  # the engine rejects more processors than it has
        found["nano_cpus"] = int(min(spec.cpus, can.cpus) * 1e9)
    if spec.memory_mb is not None:
        found["mem_limit"] = spec.memory_mb * _MiB
        found["memswap_limit"] = (spec.memory_mb + swap_mb) * _MiB
    if spec.storage_mb is not None and can.disk_quota:
        found["storage_opt"] = {"size": f"{spec.storage_mb}m"}
    if spec.gpus:
        found["device_requests"] = [gpu_request(spec.name, spec.gpus, can)]
    return found


def gpu_request(name: str, count: int, can: Capabilities) -> dict[str, Any]:
    """Returns the device request for the engine's first `count` GPUs, which all containers therefore share.

    Raises `UnsupportedTaskError` if the engine does not have enough GPUs.
    """
    from docker.types import DeviceRequest

    if can.nvidia_runtime:
        return dict(DeviceRequest(count=count, capabilities=[["gpu"]]))
    if len(can.cdi_gpus) >= count:
        return dict(DeviceRequest(driver="cdi", device_ids=list(can.cdi_gpus[:count])))
    has = f"only {len(can.cdi_gpus)}" if can.cdi_gpus else "neither NVIDIA's runtime nor CDI devices for GPUs"
    raise UnsupportedTaskError(
        f"Task {name} needs {count} GPU{'s' if count > 1 else ''}, but the Docker engine has {has}. Install the NVIDIA "
        "Container Toolkit on the engine's machine (`docker info` then lists the runtime `nvidia`), set DOCKER_HOST "
        "to an engine with GPUs, or leave this task out."
    )


def unenforced(spec: ContainerSpec, can: Capabilities) -> list[str]:
    """Returns a warning for each limit that the engine cannot enforce. Raises the errors of `gpu_request`."""
    if spec.gpus:
        gpu_request(spec.name, spec.gpus, can)
    if spec.storage_mb is not None and not can.disk_quota:
        return [
            f"storage_mb={spec.storage_mb}: not enforced by container=docker (the engine's storage driver cannot limit "
            "the disk space of a container; overlay2 on XFS mounted with pquota, btrfs and zfs can)"
        ]
    return []


_STDOUT = 1
_DRAIN_SEC = 10.0


class EngineStream:
    """The stdin and stdout of a process, as a `ChannelStream` over a connection from `Engine.hijack`.

    The engine sends output in frames: stream number, three zero bytes, length, payload. With `with_stderr`, `read`
    returns both stdout and stderr. Otherwise, stderr is discarded.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, with_stderr: bool = False
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._with_stderr = with_stderr
        self._wanted = False
        self._left = 0

    async def read(self) -> bytes:
        try:
            while True:
                if not self._left:
                    header = await self._reader.readexactly(8)
                    self._wanted = header[0] == _STDOUT or self._with_stderr
                    self._left = int.from_bytes(header[4:8], "big")
                    continue
                data = await self._reader.read(min(self._left, STREAM_CHUNK_BYTES))
                self._left -= len(data)
                if self._wanted or not data:
                    return data
        except asyncio.IncompleteReadError:
            return b""

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Closes the connection. The engine then closes the stdin of the process."""
        self._writer.close()


async def run_program(
    engine: Engine, container: str, command: Sequence[str], stdin: bytes, read: Callable[[BinaryIO], _T]
) -> tuple[_T, int]:
    """Runs a program as root in the container, in the directory `/`. Its stderr is discarded.

    `read` is called in a thread with a stream of the output, which is not seekable. Returns the result of `read` and
    the exit code. Raises errors of the engine and of `read`.
    """
    created = await in_thread(
        lambda: engine.api.exec_create(container, list(command), stdin=True, user="0:0", workdir="/"), abandon=True
    )
    connection = await engine.hijack(f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
    stream = EngineStream(*connection)
    feeder = asyncio.create_task(_feed(connection[1], stdin))
    try:
        found = await _read_in_thread(stream, read)
        await feeder
    finally:
        feeder.cancel()
        await finish(_drain(stream))  # otherwise the program would block on its output
        await finish(asyncio.wait({feeder}))
        stream.close()
    answer = await in_thread(lambda: engine.api.exec_inspect(created["Id"]), abandon=True)
    return found, int(answer["ExitCode"])


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program ended without reading everything: the exit code shows why
        writer.write(data)
        await writer.drain()
        writer.write_eof()


async def _drain(stream: EngineStream) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_DRAIN_SEC):
            while await stream.read():
                pass


async def _read_in_thread(stream: EngineStream, read: Callable[[BinaryIO], _T]) -> _T:
    """Calls `read` in a thread, and passes the stream to it through a socket pair, whose small buffer limits memory."""
    ours, theirs = socket.socketpair()

    def work() -> _T:
        with theirs, theirs.makefile("rb") as file:
            return read(file)

    try:
        _, writer = await asyncio.open_unix_connection(sock=ours)
    except BaseException:  # cancelled
        ours.close()
        theirs.close()
        raise
    reading = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        with contextlib.suppress(ConnectionError):  # the reader has ended
            while data := await stream.read():
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
        await finish(asyncio.wait({reading}))
    return reading.result()
