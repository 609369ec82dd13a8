"""A private Docker engine for tests to kill and fill up: the shared engine is never touched.

It has a network namespace to itself, since an engine without a bridge deletes the bridge `docker0` of the namespace
that it is started in, and its data on a small file system in memory.
"""

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.conftest import missing
from tests.leaks import own_directory, processes, remove_with_mounts, wait_until

DISK_MB = 96
IMAGE = "ares-exp-test/tiny:1"
ANSWERS_WITHIN_SEC = 60.0

_SOURCE = "debian:bookworm-slim"
_PROGRAMS = "sh bash cat chmod chown cp dd env head id ln ls mkdir mkfifo mv readlink rm setsid sleep stat tail tr"
# Programs with the libraries that they need, links as the files they lead to; as text, since it comes out as a log.
_PACK = f"""
set -- $(for name in {_PROGRAMS}; do command -v $name; done)
set -- /etc/passwd /etc/group $({{ printf '%s\\n' "$@"; ldd "$@" | grep -o '/[^ :)]*'; }} | sort -u)
tar -czf - --dereference --hard-dereference "$@" 2>/dev/null | base64
"""


def _why_not() -> str | None:
    """Why there can be no such engine; `None` when there can."""
    absent = [name for name in ("dockerd", "unshare", "setpriv", "mount") if shutil.which(name) is None]
    if absent:
        return f"a private Docker engine is not to be had here: no {', '.join(absent)}"
    return missing("docker")  # its image is made of an image of the shared engine


class PrivateEngine:
    """A `dockerd` that can be killed and started again. Made by the fixtures below."""

    def __init__(self, directory: Path) -> None:
        """Keeps where its files are; starts nothing."""
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.data = directory / "data"
        self.host = f"unix://{directory}/s"
        self.log = directory / "log"

    def start(self) -> None:
        """Starts it and waits until it answers. It ends with the thread that calls this."""
        (self._directory / "pid").unlink(missing_ok=True)
        isolated = ["setpriv", "--pdeathsig", "TERM", "unshare", "--net"]
        places = {"config-file": "config", "data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        paths = [f"--{option}={self._directory}/{name}" for option, name in places.items()]
        network = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*isolated, "dockerd", *paths, f"--host={self.host}", *network],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._process
        assert wait_until(lambda: self._answers() or process.poll() is not None), self.log.read_text()[-2000:]
        assert process.poll() is None, self.log.read_text()[-2000:]

    def kill(self) -> None:
        """Kills the engine, as a crash would. Its containers continue without an engine."""
        self.signal(signal.SIGKILL)
        self._process.wait(ANSWERS_WITHIN_SEC)
        containerd = self._directory / "exec" / "containerd"  # the kernel kills it with its parent
        assert wait_until(lambda: not any(f"{containerd}/containerd.toml" in words for *_, words in processes()))
        (containerd / "containerd.pid").unlink(missing_ok=True)  # the next engine would take a zombie for a server

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it with all its containers."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(ANSWERS_WITHIN_SEC)
            except subprocess.TimeoutExpired:
                self.kill()

    @contextlib.contextmanager
    def client(self) -> Iterator[docker.DockerClient]:
        client = docker.DockerClient(self.host)
        try:
            yield client
        finally:
            client.close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWERS_WITHIN_SEC)
            connection.connect(str(self._directory / "s"))
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
        return False


@pytest.fixture(scope="session")
def the_private_engine() -> Iterator[PrivateEngine]:
    """The one engine of the session. Tests take `private_engine`, and have the marker `root`."""
    if reason := _why_not():
        pytest.skip(reason)
    with _started() as engine:
        yield engine


@pytest.fixture
def private_engine(the_private_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> PrivateEngine:
    """An engine that runs, has the image `IMAGE` and is what `DOCKER_HOST` names."""
    monkeypatch.setenv("DOCKER_HOST", the_private_engine.host)
    return the_private_engine


@contextlib.contextmanager
def _started() -> Iterator[PrivateEngine]:
    """Nothing of it is left at the end."""
    directory = own_directory("engine")  # short: the path of a socket is
    engine = PrivateEngine(directory)
    (directory / "config").write_text("{}")
    engine.data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", engine.data], check=True)
    try:
        engine.start()
        with engine.client() as client:
            client.api.import_image_from_data(_tiny_image(), repository=IMAGE.split(":")[0], tag=IMAGE.split(":")[1])
        yield engine
    finally:
        engine.stop()
        for number, _, _, words in processes():
            if str(directory) in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        remove_with_mounts(directory)


def _tiny_image() -> bytes:
    shared = docker.from_env()
    try:
        return base64.b64decode(shared.containers.run(_SOURCE, ["sh", "-c", _PACK], remove=True, network_mode="none"))
    finally:
        shared.close()
