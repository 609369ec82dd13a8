"""The egress proxy, through which a container with an allowlist policy reaches its allowed hosts.

Each container has its own proxy, which runs in this process. The proxy's socket listens inside the container's network,
which has no other connection to the outside. Programs find the proxy through the usual variables (`HTTPS_PROXY`, …).
The proxy supports `CONNECT` and plain HTTP, to any port of an allowed host.

The proxy resolves only allowed names, checks the resulting address, and connects to exactly this address. It never
connects to loopback and link-local addresses of this machine (for example, cloud metadata). Other non-public addresses
need their own entry in the allowlist. Otherwise, the owner of an allowed name could redirect it to any machine of a
private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ares_exp.cancellation import cancel_all
from ares_exp.containers.network_policy import IPAddress, NetworkPolicy, normalise_host

MAX_CONNECTIONS = 64
"""Maximum number of simultaneous connections of one container.

Further connections get an error response. Above twice this number, connections are dropped without a response.
"""

HEAD_TIMEOUT_SEC = 20.0
RESOLVE_TIMEOUT_SEC = 15.0
CONNECT_TIMEOUT_SEC = 15.0
IDLE_TIMEOUT_SEC = 600.0
"""Number of seconds without data in either direction after which the proxy closes a connection."""

_LINGER_SEC = 2.0
_DROP_SEC = 5.0
_CHUNK_BYTES = 64 * 1024
_RESOLVERS = 8
_logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) (\S+) HTTP/1\.[01]")
_HOST = r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])"
_AUTHORITY = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_URL = re.compile(rf"http://{_HOST}(?::(?P<port>\d{{1,5}}))?(?P<path>[/?].*)?", re.IGNORECASE)
_HEADER = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[^\r\n\0]*")
_HOP_BY_HOP = {"host", "connection", "proxy-connection", "keep-alive", "proxy-authorization"}


async def resolve_name(name: str) -> Sequence[IPAddress]:
    """Resolves a DNS name on this machine and returns its addresses."""
    find = functools.partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(os.getpid()), find)
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))


@functools.lru_cache(maxsize=4)
def _resolvers(pid: int) -> ThreadPoolExecutor:
    """Returns the thread pool for DNS lookups. It is separate, because many slow lookups could fill a shared pool."""
    return ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="egress names")


class EgressProxy:
    """The egress proxy of one container. It accepts or rejects each request according to the network policy."""

    def __init__(
        self,
        policy: NetworkPolicy,
        *,
        known_hosts: Mapping[str, IPAddress] | None = None,
        resolve: Callable[[str], Awaitable[Sequence[IPAddress]]] = resolve_name,
    ) -> None:
        """Creates the proxy without starting it.

        Args:
            policy: Network policy. The proxy rejects all requests unless its mode is `allowlist`.
            known_hosts: Trusted addresses of some names, as in /etc/hosts. These names are not looked up.
            resolve: Function that looks up the addresses of all other names.
        """
        self._policy = policy
        self._known_hosts = {name.lower().rstrip("."): address for name, address in (known_hosts or {}).items()}
        self._resolve = resolve
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Serves the connections of `listener`, a listening socket that the proxy then owns and closes."""
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)

    async def set_policy(self, policy: NetworkPolicy) -> None:
        """Applies a new policy to later requests, and cuts every open connection."""
        self._policy = policy
        await self._drop_connections()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._drop_connections()

    async def destinations(self, host: str) -> list[IPAddress]:
        """Returns the allowed addresses of `host`, at least one. `host` is a name or an address in canonical form.

        Raises `RefusedError` if the host is not allowed, or its name cannot be resolved.
        """
        policy = self._policy
        literal: IPAddress | None = None
        with contextlib.suppress(ValueError):
            literal = _unmapped(ipaddress.ip_address(host))
        if policy.mode != "allowlist" or not (
            policy.allows_name(host) if literal is None else policy.allows_address(literal)
        ):
            raise RefusedError("403 Forbidden", f"{host} is not in the allowed_hosts of this task.")
        known = literal or self._known_hosts.get(host)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_SEC):
                found = [_unmapped(address) for address in ([known] if known else await self._resolve(host))]
        except OSError:
            raise RefusedError("502 Bad Gateway", f"The name {host} cannot be resolved.") from None
        allowed = [
            address
            for address in found
            if not _is_ours(address) and (known or address.is_global or policy.allows_address(address))
        ]
        if not allowed:
            raise RefusedError(
                "403 Forbidden",
                f"{host} resolves to {', '.join(map(str, found))}, which is not a public address. To allow a private "
                "address, add the address to allowed_hosts. Loopback and link-local addresses are never allowed.",
            )
        return allowed

    async def _drop_connections(self) -> None:
        await cancel_all(*self._connections, within_sec=_DROP_SEC)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= 2 * MAX_CONNECTIONS:  # each connection takes a descriptor of this process
            writer.transport.abort()
            return
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            await self._answer(reader, writer)
            writer.close()
            async with asyncio.timeout(IDLE_TIMEOUT_SEC):
                await writer.wait_closed()
        except (OSError, EOFError) as error:  # a `TimeoutError` is also an `OSError`
            _logger.debug("A connection to the egress proxy ended: %r", error)
        finally:
            writer.transport.abort()
            self._connections.discard(connection)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                raise RefusedError("503 Service Unavailable", f"Expected at most {MAX_CONNECTIONS} open connections.")
            async with asyncio.timeout(HEAD_TIMEOUT_SEC):
                request = await read_request(reader)
            far_reader, far_writer = await self._reach(request)
        except RefusedError as refused:
            await _refuse(reader, writer, refused)
            return
        try:
            if not request.head:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            far_writer.write(request.head)
            await self._relay(reader, writer, far_reader, far_writer)
        finally:
            far_writer.transport.abort()

    async def _reach(self, request: ProxyRequest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        last: OSError | None = None
        for address in await self.destinations(request.host):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SEC):
                    return await asyncio.open_connection(str(address), request.port)
            except OSError as error:
                last = error
        _logger.debug("The egress proxy cannot reach %s: %r", request.host, last)
        raise RefusedError("502 Bad Gateway", f"{request.host} port {request.port} cannot be reached.")

    async def _relay(
        self,
        near_reader: asyncio.StreamReader,
        near_writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """Copies bytes in both directions until the server closes its side. The client may stop sending before that."""
        async with asyncio.timeout(IDLE_TIMEOUT_SEC) as idle:

            async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(_CHUNK_BYTES):
                    if not idle.expired():
                        idle.reschedule(asyncio.get_running_loop().time() + IDLE_TIMEOUT_SEC)
                    writer.write(data)
                    await writer.drain()

            async def upload() -> None:
                try:
                    await copy(near_reader, far_writer)
                    far_writer.write_eof()
                except OSError:
                    far_writer.transport.abort()

            uploading = asyncio.create_task(upload())
            try:
                await copy(far_reader, near_writer)
            finally:
                await cancel_all(uploading)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refused: RefusedError) -> None:
    """Sends an error response, and waits briefly for the client to read it: an immediate close could discard it."""
    _logger.debug("The egress proxy rejected a request: %s", refused)
    body = f"ares_exp: {refused}\n".encode()
    head = f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SEC):
            while await reader.read(_CHUNK_BYTES):
                pass


def _unmapped(address: IPAddress) -> IPAddress:
    """Converts an IPv4-mapped IPv6 address to IPv4, because the kernel treats `::ffff:127.0.0.1` as 127.0.0.1."""
    return getattr(address, "ipv4_mapped", None) or address


def _is_ours(address: IPAddress) -> bool:
    """Returns whether the proxy must never connect to an address: loopback, link-local, multicast or unspecified."""
    return address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast


class RefusedError(Exception):
    """A rejected proxy request. `status` is the HTTP status code with its reason phrase."""

    def __init__(self, status: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """The target of a proxy request. The host is in canonical form.

    `head` contains the bytes to send to the target first: nothing for `CONNECT`, otherwise the rewritten request.
    """

    host: str
    port: int
    head: bytes = b""


async def read_request(reader: asyncio.StreamReader) -> ProxyRequest:
    """Reads the request line and headers of one proxy request. The caller sets the timeout.

    The limit of `reader` must be `MAX_HEAD_BYTES`. Raises `RefusedError` if the request is malformed or longer, and
    `EOFError` if the client disconnected.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise RefusedError(
            "431 Request Header Fields Too Large", f"Expected headers of at most {MAX_HEAD_BYTES} bytes."
        ) from None
    first, *headers = head[:-4].decode("latin-1").split("\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    fields = [_HEADER.fullmatch(header) for header in headers]
    if line is None or not all(fields):
        raise RefusedError("400 Bad Request", "Expected an HTTP/1.1 request.")
    method, target = line.groups()
    found = (_AUTHORITY if method == "CONNECT" else _URL).fullmatch(target)
    if found is None:
        raise RefusedError("400 Bad Request", "Expected CONNECT host:port or a request for http://host/path.")
    host, port = _host(found["host"]), int(found["port"] or 80)
    if not 0 < port < 65536:
        raise RefusedError("400 Bad Request", f"Expected a port from 1 to 65535, got {port}.")
    if method == "CONNECT":
        return ProxyRequest(host, port)
    kept = [field[0] for field in fields if field is not None and field["name"].lower() not in _HOP_BY_HOP]
    path = found["path"] or "/"
    path = path if path.startswith("/") else f"/{path}"
    shown = found["host"] + (f":{found['port']}" if found["port"] else "")
    # One request per connection, because the next request of an open connection might be for another host.
    lines = [f"{method} {path} HTTP/1.1", f"Host: {shown}", *kept, "Connection: close", "", ""]
    return ProxyRequest(host, port, "\r\n".join(lines).encode("latin-1"))


def _host(text: str) -> str:
    try:
        return normalise_host(text.strip("[]"))
    except ValueError:
        raise RefusedError("400 Bad Request", f"Expected a host name or an IP address, got {text!r}.") from None
