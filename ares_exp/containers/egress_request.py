"""Strict parser for the head of an egress proxy request, which may come from a hostile client."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from ares_exp.containers.network_policy import normalise_host

MAX_HEAD_BYTES = 32 * 1024

_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) (\S+) HTTP/1\.[01]")
_HOST = r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])"
_AUTHORITY = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_URL = re.compile(rf"http://{_HOST}(?::(?P<port>\d{{1,5}}))?(?P<path>[/?].*)?", re.IGNORECASE)
_HEADER = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[^\r\n\0]*")
_HOP_BY_HOP = {"host", "connection", "proxy-connection", "keep-alive", "proxy-authorization"}


class RefusedError(Exception):
    """A refused proxy request.

    Attributes:
        status: HTTP status code and reason phrase.
    """

    def __init__(self, status: str, sentence: str) -> None:
        """Keeps both for the answer."""
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """The target of a proxy request.

    Attributes:
        host: A DNS name or an IP address, canonical.
        port: 1 to 65535.
        head: Bytes to send there first: empty for `CONNECT`, the rewritten request for plain HTTP.
    """

    host: str
    port: int
    head: bytes = b""

    @property
    def is_tunnel(self) -> bool:
        return not self.head


async def read_request(reader: asyncio.StreamReader) -> ProxyRequest:
    """Reads one request head from a stream whose limit is `MAX_HEAD_BYTES`. The caller bounds the time.

    Raises:
        RefusedError: It is malformed or too long.
        EOFError: The client disconnected.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise RefusedError("431 Request Header Fields Too Large", f"More than {MAX_HEAD_BYTES} bytes.") from None
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
    # One request per connection: the next one of a connection that stays open might be for another host.
    lines = [f"{method} {path} HTTP/1.1", f"Host: {shown}", *kept, "Connection: close", "", ""]
    return ProxyRequest(host, port, "\r\n".join(lines).encode("latin-1"))


def _host(text: str) -> str:
    try:
        return normalise_host(text.strip("[]"))
    except ValueError:
        raise RefusedError("400 Bad Request", f"Expected a host name or an IP address, got {text!r}.") from None
