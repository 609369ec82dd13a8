"""The egress proxy on real sockets: what it lets through, and what hostile clients get."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from ares_exp.containers import egress_proxy
from ares_exp.containers.egress_proxy import MAX_CONNECTIONS, MAX_HEAD_BYTES, EgressProxy, RefusedError
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, IPAddress, NetworkPolicy
from ares_exp.testing.host_server import host_address
from tests.closed_port import closed_port

BOUND_SEC = 20.0

DNS = {
    "public.example": ["93.184.215.14", "2606:2800:21f::1"],
    "private.example": ["10.1.2.3"],
    "private6.example": ["fd00::1"],
    "listed.example": ["10.1.2.4", "10.1.2.3"],
    "mixed.example": ["127.0.0.1", "93.184.215.14"],
    "loopback.example": ["127.0.0.1", "::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "metadata.example": ["169.254.169.254"],
    "nowhere.example": ["0.0.0.0"],
}

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def allowing(*hosts: str) -> NetworkPolicy:
    return NetworkPolicy("allowlist", frozenset(hosts))


class Names:
    """A resolver that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[IPAddress]:
        self.asked.append(name)
        if name not in DNS:
            raise socket.gaierror(f"no {name}")
        return [ipaddress.ip_address(address) for address in DNS[name]]


@pytest.mark.parametrize(
    ("hosts", "host", "expected"),
    [
        (["public.example"], "public.example", ["93.184.215.14", "2606:2800:21f::1"]),
        (["*.example"], "public.example", ["93.184.215.14", "2606:2800:21f::1"]),
        (["*.example"], "mixed.example", ["93.184.215.14"]),
        (["listed.example", "10.1.2.3"], "listed.example", ["10.1.2.3"]),
        (["private.example", "10.0.0.0/8"], "private.example", ["10.1.2.3"]),
        (["10.1.2.3"], "10.1.2.3", ["10.1.2.3"]),
        (["10.1.2.3"], "::ffff:10.1.2.3", ["10.1.2.3"]),
        (["2001:db8::/32"], "2001:db8::7", ["2001:db8::7"]),
        (["known.example"], "known.example", ["10.9.9.9"]),
    ],
)
async def test_allowed_names_are_resolved(hosts: list[str], host: str, expected: list[str]) -> None:
    known: dict[str, IPAddress] = {"Known.example.": ipaddress.ip_address("10.9.9.9")}
    proxy = EgressProxy(allowing(*hosts), known_hosts=known, resolve=Names())
    assert [str(address) for address in await proxy.destinations(host)] == expected


@pytest.mark.parametrize(
    ("hosts", "host", "message"),
    [
        ([], "public.example", "public.example is not in the allowed_hosts of this task"),
        (["example"], "public.example", "not in the allowed_hosts"),
        (["93.184.215.14"], "public.example", "not in the allowed_hosts"),
        (["public.example"], "93.184.215.14", "not in the allowed_hosts"),
        (
            ["private.example"],
            "private.example",
            r"private.example resolves to 10\.1\.2\.3, which is not a public address",
        ),
        (
            ["private6.example"],
            "private6.example",
            "private6.example resolves to fd00::1, which is not a public address",
        ),
        (["loopback.example", "127.0.0.0/8", "::1"], "loopback.example", "never allowed"),
        (["127.0.0.1"], "127.0.0.1", "never allowed"),
        (["0.0.0.0/0"], "127.0.0.1", "never allowed"),
        (["::/0", "0.0.0.0/0"], "::ffff:127.0.0.1", "never allowed"),
        (["mapped.example"], "mapped.example", "never allowed"),
        (["metadata.example", "169.254.0.0/16"], "metadata.example", "never allowed"),
        (["169.254.169.254"], "169.254.169.254", "never allowed"),
        (["nowhere.example", "0.0.0.0"], "nowhere.example", "never allowed"),
        (["absent.example"], "absent.example", "The name absent.example cannot be resolved"),
    ],
)
async def test_forbidden_names_are_refused(hosts: list[str], host: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        await EgressProxy(allowing(*hosts), resolve=Names()).destinations(host)


@pytest.mark.parametrize("policy", [NO_NETWORK, PUBLIC, allowing("other.example")])
async def test_forbidden_name_is_not_resolved(policy: NetworkPolicy) -> None:
    names = Names()
    with pytest.raises(RefusedError):
        await EgressProxy(policy, resolve=names).destinations("public.example")
    assert names.asked == []


async def test_names_of_this_machine_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"127\.0\.0\.1"):
        await EgressProxy(allowing("localhost")).destinations("localhost")


class Origin:
    """A server outside: echoes bytes, keeps what it got, and ends when its client has."""

    def __init__(self) -> None:
        self.received = b""
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while data := await reader.read(65536):
                self.received += data
                writer.write(data)
                await writer.drain()
            writer.write(b"bye")
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def origin() -> AsyncIterator[tuple[Origin, str, int]]:
    """The server, its address and its port."""
    address, server = host_address(), Origin()
    listening = await asyncio.start_server(server.serve, address, 0)
    yield server, address, listening.sockets[0].getsockname()[1]
    listening.close()


@pytest.fixture
async def proxy(origin: tuple[Origin, str, int]) -> AsyncIterator[EgressProxy]:
    proxy = EgressProxy(allowing(origin[1]), resolve=Names())
    yield proxy
    await proxy.close()


@pytest.fixture
async def dial(proxy: EgressProxy) -> AsyncIterator[Dial]:
    async with started(proxy) as connect:
        yield connect


@asynccontextmanager
async def started(proxy: EgressProxy) -> AsyncIterator[Dial]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await proxy.start(listener)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await proxy.close()


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Waits for the proxy's end of a connection; whether it came without another byte."""
    try:
        return await asyncio.wait_for(reader.read(), BOUND_SEC) == b""
    except ConnectionError:
        return True


async def answer(dial: Dial, request: bytes, *, end: bool = False) -> str:
    """Everything that the proxy says to `request`, until it hangs up."""
    reader, writer = await dial()
    writer.write(request)
    if end:
        writer.write_eof()
    return (await asyncio.wait_for(reader.read(), BOUND_SEC)).decode()


async def tunnel(dial: Dial, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await dial()
    writer.write(f"CONNECT {address}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_SEC)
    assert head == b"HTTP/1.1 200 Connection established\r\n\r\n"
    return reader, writer


async def test_tunnel_carries_any_bytes_and_half_closes(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    reader, writer = await tunnel(dial, *origin[1:])
    data = bytes(range(256)) * 4000
    writer.write(data)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), BOUND_SEC) == data + b"bye"


async def test_plain_http_is_rewritten_for_the_origin(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    server, address, port = origin
    request = (
        f"POST http://{address}:{port}/a?b=c HTTP/1.1\r\nHost: elsewhere.example\r\nContent-Length: 4\r\n"
        "Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eA==\r\nConnection: keep-alive\r\n"
        "X-Kept: 1\r\n\r\nbody"
    )
    await answer(dial, request.encode(), end=True)
    assert server.received.decode() == (
        f"POST /a?b=c HTTP/1.1\r\nHost: {address}:{port}\r\nContent-Length: 4\r\nX-Kept: 1\r\n"
        "Connection: close\r\n\r\nbody"
    )


async def test_forbidden_host_gets_a_clear_message(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    for request in ("CONNECT other.example:443 HTTP/1.1\r\n\r\n", "GET http://other.example/ HTTP/1.1\r\n\r\n"):
        said = await answer(dial, request.encode(), end=True)
        assert said.startswith("HTTP/1.1 403 Forbidden\r\n")
        assert said.endswith("\r\n\r\nares_exp: other.example is not in the allowed_hosts of this task.\n")
    assert origin[0].connections == 0


async def test_unreachable_origin_is_a_bad_gateway(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    with closed_port(origin[1]) as port:
        said = await answer(dial, f"CONNECT {origin[1]}:{port} HTTP/1.1\r\n\r\n".encode(), end=True)
    assert said.startswith("HTTP/1.1 502 ")
    assert f"{origin[1]} port {port} cannot be reached" in said


@pytest.mark.parametrize(
    "request_",
    [
        *(b"\r\n\r\n", b"\0\xff\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"),
        *(b"GET https://a.example/ HTTP/1.1\r\n\r\n", b"GET http://user@a.example/ HTTP/1.1\r\n\r\n"),
        *(b"GET http://a.example:http/ HTTP/1.1\r\n\r\n", b"GET http://a.example/ HTTP/2.0\r\n\r\n"),
        *(b"CONNECT a.example HTTP/1.1\r\n\r\n", b"CONNECT a.example:0 HTTP/1.1\r\n\r\n"),
        *(b"CONNECT a.example:65536 HTTP/1.1\r\n\r\n", b"CONNECT *.example:80 HTTP/1.1\r\n\r\n"),
        *(b"CONNECT 10.0.0.0/8:80 HTTP/1.1\r\n\r\n", b"CONNECT a..example:80 HTTP/1.1\r\n\r\n"),
        b"CONNECT [fe80::1%lo]:80 HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nfolded: a\r\n b\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nbare: a\nHost: b\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
async def test_garbage_is_a_bad_request(dial: Dial, request_: bytes, origin: tuple[Origin, str, int]) -> None:
    assert (await answer(dial, request_, end=True)).startswith("HTTP/1.1 400 ")
    await tunnel(dial, *origin[1:])  # and goes on


async def test_endless_head_is_refused(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    flood = b"GET http://a.example/ HTTP/1.1\r\n" + b"X: " + b"y" * 4 * MAX_HEAD_BYTES
    assert (await answer(dial, flood, end=True)).startswith("HTTP/1.1 431 ")
    assert await answer(dial, b"CONNECT a.example:80 HT", end=True) == ""


async def test_slow_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_proxy, "HEAD_TIMEOUT_SEC", 0.2)
    async with started(EgressProxy(allowing())) as dial:
        reader, writer = await dial()
        writer.write(b"CONNECT a.exa")
        assert await hung_up(reader)


async def test_vanished_clients_are_cleaned_up(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    for _ in range(5):
        _, writer = await tunnel(dial, *origin[1:])
        writer.transport.abort()
    await tunnel(dial, *origin[1:])


async def test_excess_connections_are_refused(dial: Dial, origin: tuple[Origin, str, int]) -> None:
    tunnels = [await tunnel(dial, *origin[1:]) for _ in range(MAX_CONNECTIONS)]
    assert (await answer(dial, b"", end=True)).startswith("HTTP/1.1 503 ")
    reader, writer = tunnels[0]
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), BOUND_SEC) == b"bye"
    async with asyncio.timeout(BOUND_SEC):
        while (said := await answer(dial, b"GET / HTTP/1.1\r\n\r\n", end=True)).startswith("HTTP/1.1 503 "):
            pass
    assert said.startswith("HTTP/1.1 400 ")


async def test_flood_of_connections_is_dropped(monkeypatch: pytest.MonkeyPatch, dial: Dial) -> None:
    monkeypatch.setattr(egress_proxy, "_LINGER_SEC", 600.0)
    held = [await dial() for _ in range(2 * MAX_CONNECTIONS)]
    for reader, _ in held[MAX_CONNECTIONS:]:
        assert (await asyncio.wait_for(reader.readline(), BOUND_SEC)).startswith(b"HTTP/1.1 503 ")
    reader, _ = await dial()
    assert await hung_up(reader)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_idle_tunnel_is_closed(
    monkeypatch: pytest.MonkeyPatch, dial: Dial, origin: tuple[Origin, str, int], is_busy: bool
) -> None:
    monkeypatch.setattr(egress_proxy, "IDLE_TIMEOUT_SEC", 2.5 if is_busy else 0.2)
    reader, writer = await tunnel(dial, *origin[1:])
    for _ in range(5 if is_busy else 0):
        await asyncio.sleep(0.6)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(1), BOUND_SEC) == b"x"
    assert await hung_up(reader)


@pytest.mark.parametrize("policy", [NO_NETWORK, PUBLIC, allowing("192.0.2.99")])
async def test_new_policy_closes_open_tunnels(
    dial: Dial, proxy: EgressProxy, origin: tuple[Origin, str, int], policy: NetworkPolicy
) -> None:
    server, address, port = origin
    reader, writer = await tunnel(dial, address, port)
    await proxy.set_policy(policy)
    writer.write(b"after")
    assert await hung_up(reader)
    assert server.received == b""
    request = f"CONNECT {address}:{port} HTTP/1.1\r\n\r\n".encode()
    assert (await answer(dial, request, end=True)).startswith("HTTP/1.1 403 ")
    await proxy.set_policy(allowing(address))
    await tunnel(dial, address, port)


async def test_closed_proxy_refuses_connections(
    dial: Dial, proxy: EgressProxy, origin: tuple[Origin, str, int]
) -> None:
    reader, _ = await tunnel(dial, *origin[1:])
    await proxy.close()
    await proxy.close()
    assert await hung_up(reader)
    with pytest.raises(OSError):  # noqa: PT011
        await dial()
