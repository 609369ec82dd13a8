"""Sockets inside the network namespace of another process.

A socket belongs to the namespace in which it was made, whichever process holds it. So a thread that briefly enters a
container's namespace can bring back a socket that listens there, and the container needs no route to this machine.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def obstacle() -> str | None:
    """Returns why this process cannot enter the network of a container, as a clause; `None` when it can."""
    if sys.platform != "linux":
        return "this machine does not run Linux"
    try:
        with Path("/proc/self/ns/net").open("rb") as own:
            _visit(own, lambda: None)
    except OSError as error:
        return f"this process may not enter the network of a container ({error.strerror}), as root may"
    return None


def listen_inside(pid: int, container_id: str, address: tuple[str, int]) -> socket.socket:
    """Opens a socket that listens at `address` in the network of a container. Blocking, for a millisecond.

    Args:
        pid: The container's first process, as numbered on this machine.
        container_id: Its full id, which distinguishes it from a local process of the same number.
        address: An address of that network, and a port.

    Raises:
        OSError: No such process, no right to enter, or the address is taken.
    """
    process = Path("/proc", str(pid))
    with (process / "ns" / "net").open("rb") as namespace:
        if container_id not in (process / "mountinfo").read_text():
            raise ProcessLookupError(f"process {pid} of this machine is not the container's: its engine runs elsewhere")
        return _visit(namespace, lambda: socket.create_server(address))


def _visit(namespace: IO[bytes], act: Callable[[], _T]) -> _T:
    """Runs `act` in a thread that enters `namespace` and ends there."""
    results: list[_T] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            results.append(act())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="network visit")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
