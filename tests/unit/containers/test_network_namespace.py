import os
import socket
import subprocess
from pathlib import Path

import pytest

from ares_exp.containers.network_namespace import listen_in_namespace, listen_inside
from tests.unit.containers.local_containers import as_ordinary_user


@pytest.mark.root
def test_inner_socket_is_invisible_outside() -> None:
    other = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1)
    try:
        other.stdout.readline()
        in_every_mountinfo = "/proc"
        port = 9  # which nobody serves outside, as one that is free inside may be
        with listen_inside(other.pid, in_every_mountinfo, ("127.0.0.1", port)):
            assert f"0100007F:{port:04X} 00000000:0000 0A" in Path(f"/proc/{other.pid}/net/tcp").read_text()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            with socket.create_server(("127.0.0.1", 0)) as ours:  # and this thread has stayed where it was
                socket.create_connection(ours.getsockname(), timeout=5).close()
    finally:
        other.kill()
        other.communicate()


@pytest.mark.root
def test_process_outside_the_container_is_refused() -> None:
    with pytest.raises(ProcessLookupError, match="the engine runs elsewhere"):
        listen_inside(os.getpid(), "f" * 64, ("127.0.0.1", 0))
    with pytest.raises(FileNotFoundError):
        listen_inside(2**22 + 1, "f" * 64, ("127.0.0.1", 0))
    with pytest.raises(ProcessLookupError, match="now belongs to another process"):
        listen_in_namespace(os.getpid(), 1, ("127.0.0.1", 0))


@pytest.mark.local
def test_ordinary_user_gets_a_reason() -> None:
    code = "from ares_exp.containers.network_namespace import obstacle; print(obstacle())"
    done = as_ordinary_user("-c", code)
    assert done.stdout.strip() == (
        "this process may not enter the network of a container (Operation not permitted), which needs root"
    ), done.stderr
