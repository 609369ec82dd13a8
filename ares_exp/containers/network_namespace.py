"""Listening sockets inside the network namespace of another process, such as a process of a container.

A socket belongs to the namespace in which it was created, even if another process uses it. So a thread that briefly
enters a container's namespace can return a socket that listens there. An ordinary user may enter only through the
container's user namespace, which a process with several threads cannot enter. For such users, a short-lived helper
process enters the namespace and passes the socket back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

_CLONE_NEWNET = 0x40000000
_HELPER_SEC = 30.0
_T = TypeVar("_T")

# Arguments: descriptors of a user namespace, a network namespace and a socket for the result; host and port.
_HELPER = """
import ctypes, os, socket, sys
user, network, answers, port = (int(word) for word in sys.argv[1:5])
answers = socket.socket(fileno=answers)
try:
    enter = ctypes.CDLL(None, use_errno=True).setns
    for namespace, kind in ((user, 0x10000000), (network, 0x40000000)):
        if enter(namespace, kind) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.create_server((sys.argv[5], port)) as server:
        socket.send_fds(answers, [b"0"], [server.fileno()])
except OSError as error:
    answers.send(str(error.errno or 1).encode())
"""


def obstacle() -> str | None:
    """Returns why this process cannot enter the network of a container, as a clause for a message. `None`: it can."""
    if sys.platform != "linux":
        return "this machine does not run Linux"
    try:
        with Path("/proc/self/ns/net").open("rb") as own:
            _visit(own, lambda: None)
    except OSError as error:
        return f"this process may not enter the network of a container ({error.strerror}), which needs root"
    return None


def listen_inside(pid: int, container_id: str, address: tuple[str, int]) -> socket.socket:
    """Opens a socket that listens at `address` in the network of an engine's container. Blocks for a millisecond.

    `pid` is the process number of the container's first process, as reported by the engine. Raises `ProcessLookupError`
    if this machine's process `pid` is not in the container, because the engine runs on another machine. Raises
    `OSError` if the socket cannot be opened.
    """
    process = Path("/proc", str(pid))
    with (process / "ns" / "net").open("rb") as namespace:
        if container_id not in (process / "mountinfo").read_text():
            raise ProcessLookupError(f"process {pid} is not in the container, because the engine runs elsewhere")
        return _visit(namespace, lambda: socket.create_server(address))


def listen_in_namespace(pid: int, namespace: int, address: tuple[str, int]) -> socket.socket:
    """Opens a socket that listens at `address` in the network of a process of this user. Blocks for some milliseconds.

    `namespace` is the expected inode of the process's network namespace. Raises `ProcessLookupError` if the inode
    differs, because the number `pid` then belongs to a later process. Raises `OSError` if the socket cannot be opened.
    """
    entries = Path("/proc", str(pid), "ns")
    with (entries / "net").open("rb") as network:
        if os.fstat(network.fileno()).st_ino != namespace:
            raise ProcessLookupError(f"the process number {pid} now belongs to another process")
        if (entries / "user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino:
            return _visit(network, lambda: socket.create_server(address))
        with (entries / "user").open("rb") as user:
            return _listen_by_helper(user, network, address)


def _listen_by_helper(user: IO[bytes], network: IO[bytes], address: tuple[str, int]) -> socket.socket:
    host, port = address
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        ours.settimeout(_HELPER_SEC)
        passed = (user.fileno(), network.fileno(), theirs.fileno())
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _HELPER, *map(str, passed), str(port), host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=passed,
            timeout=_HELPER_SEC,
            check=False,
        )
        theirs.close()
        answer, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        if descriptors:
            return socket.socket(fileno=descriptors[0])
        if answer:
            raise OSError(int(answer), os.strerror(int(answer)))
        raise OSError(f"the helper process ended with status {done.returncode}: {done.stderr.decode()[-500:].strip()}")


def _visit(namespace: IO[bytes], act: Callable[[], _T]) -> _T:
    def run() -> _T:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return act()

    with ThreadPoolExecutor(1, "network visit") as thread:
        return thread.submit(run).result()
