import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Its number. It is bound meanwhile, so that nobody else is given it."""
    with socket.socket() as reserved:
        reserved.bind((address, 0))
        yield reserved.getsockname()[1]
