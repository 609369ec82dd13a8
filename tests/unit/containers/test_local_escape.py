"""More tries to get out of a local container: sockets, terminals, system calls, descriptors, channels.

Where it is not plain that a try could succeed, the same is done outside first. Runs as root and as an ordinary user.
"""

import contextlib
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.network_policy import PUBLIC
from tests.unit.containers.local_containers import ROOT, local_container, needs_local

pytestmark = [needs_local, pytest.mark.once]


@pytest.fixture
async def container() -> AsyncIterator[LocalContainer]:
    async with local_container() as started:
        yield started


async def output(container: LocalContainer, command: str) -> str:
    return (await container.exec(command, timeout_sec=20)).output


async def python(container: LocalContainer, script: str) -> str:
    return await output(container, f"python3 - 2>&1 <<'EOF'\n{script}\nEOF")


@contextlib.contextmanager
def greeting(listener: socket.socket) -> Iterator[None]:
    """Answers everybody who connects with `hello`."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


CONNECT = """
import socket
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(5)
    try:
        client.connect({!r})
        print(client.recv(9).decode())
    except OSError as error:
        print(type(error).__name__)
"""


def seen_from_the_host(name: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", CONNECT.format(name)], capture_output=True, text=True, timeout=20, check=True
    )
    return run.stdout.strip()


@pytest.mark.parametrize(("network", "answer"), [("no-network", "ConnectionRefusedError"), ("public", "hello")])
async def test_abstract_host_sockets_are_unreachable(network: str, answer: str) -> None:
    name = f"\0ares-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        factory = LocalContainerFactory(network=network)  # type: ignore[arg-type]
        with greeting(listener):
            assert seen_from_the_host(name) == "hello"
            async with factory(ContainerSpec(name="t", network=PUBLIC)) as container:
                assert (await python(container, CONNECT.format(name))).strip() == answer


async def test_named_host_sockets_are_unreachable() -> None:
    folders = [one for one in ("/tmp", "/run", "/var/tmp", "/dev/shm") if os.access(one, os.W_OK)]
    async with LocalContainerFactory(network="public")(ContainerSpec(name="t", network=PUBLIC)) as container:
        for name in (f"{folder}/ares-{os.getpid()}.sock" for folder in folders):
            with contextlib.ExitStack() as ends:
                listener = ends.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(name)
                ends.callback(Path(name).unlink)
                listener.listen()
                ends.enter_context(greeting(listener))
                assert seen_from_the_host(name) == "hello"
                assert await python(container, CONNECT.format(name)) == "FileNotFoundError\n"
                assert await python(container, CONNECT.format(f"/proc/1/root{name}")) == "FileNotFoundError\n"


TERMINAL = """
import asyncio, os
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory

TRY = '''
import fcntl, os, termios
for path in ("/dev/tty", "/dev/console", "/dev/pts/0", "/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/fd/2"):
    try:
        with open(path) as terminal:
            fcntl.ioctl(terminal, termios.TIOCSTI, b"x")
            print(path, "typed")
    except OSError as error:
        print(path, type(error).__name__)
print(os.ttyname(0) if os.isatty(0) else "no terminal")
'''

async def main():
    with open("/dev/tty") as terminal:
        print("terminal outside", os.isatty(terminal.fileno()))
    async with LocalContainerFactory()(ContainerSpec(name="x")) as container:
        print((await container.exec(f"python3 - <<'EOF'\\n{TRY}\\nEOF", timeout_sec=20)).output)
    print("END")

asyncio.run(main())
"""


def test_runner_terminal_is_unreachable() -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-B", "-c", TERMINAL])
    seen = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            seen += data
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, seen
    lines = seen.decode().split("\r\n")
    assert "terminal outside True" in lines
    assert "no terminal" in lines
    assert "END" in lines
    assert not [line for line in lines if line.endswith("typed")]


CALLS = [
    "os.chroot('/usr')",
    "os.mkdir('/tmp/jail') or os.open('/', os.O_RDONLY) and os.chroot('/tmp/jail')",  # the way out of a chroot
    "os.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
    "os.setns(os.pidfd_open(1), 0x00020000)",
    "os.unshare(0x10000000)",
    "os.unshare(0x02000000)",
    "os.mknod('/tmp/mem', 0o20600, os.makedev(1, 1))",
    "os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1] + 1))",
    "Path('/proc/self/oom_score_adj').write_text('-1000')",
    "Path('/proc/sys/kernel/core_pattern').write_text('|/tmp/x')",
    "Path('/proc/1/uid_map').write_text('0 0 1')",
    "open('/dev/mem', 'rb').read(1)",
    "socket.socket(40, socket.SOCK_STREAM)",  # to the hypervisor
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 0))",  # sets an interface's flags
    "time.clock_settime(time.CLOCK_REALTIME, 0)",
]


async def test_dangerous_calls_are_refused(container: LocalContainer) -> None:
    script = f"""
import ctypes, fcntl, os, resource, socket, struct, time
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "refused")
for name in ("setns", "unshare"):  # Python has them since 3.12
    if not hasattr(os, name):
        setattr(os, name, lambda *arguments, name=name: checked(getattr(libc, name)(*arguments)))
for call in {CALLS!r}:
    try:
        exec(call)
        print("done", call)
    except (OSError, ValueError):
        print("refused")
"""
    assert (await python(container, script)).split("\n") == ["refused"] * len(CALLS) + [""]


async def test_runner_descriptors_are_not_inherited(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the runner")
    with secret.open() as leak, socket.create_server(("127.0.0.1", 0)) as server:
        for descriptor in (leak.fileno(), server.fileno()):
            os.set_inheritable(descriptor, True)
        async with local_container() as container:
            reading = "timeout 1 cat /proc/[0-9]*/fd/* </dev/null"
            seen = await output(container, f"sleep 0.2; ls -l /proc/[0-9]*/fd; {reading}")
    assert "/proc/1/fd:" in seen
    assert "pipe:" in seen  # of the first process: its requests
    for trace in ("of the runner", "secret", "socket:", "memfd:", "anon_inode"):
        assert trace not in seen


async def test_processes_have_root_and_directory_in_the_box(container: LocalContainer) -> None:
    mark = f"ares-root-{os.getpid()}"
    await output(container, f"touch /{mark}; cd /tmp; (setsid sleep 60 >/dev/null 2>&1 &)")
    look = f"for p in /proc/[0-9]*; do ls $p/root/{mark} $p/cwd/../{mark}; done 2>&1"  # one may end meanwhile: again
    again = f'for _ in $(seq 100); do seen=$({look}); echo "$seen" | grep -q "No such file" || break; sleep 0.1; done'
    seen = await output(container, f'cd /; {again}; echo "$seen"')
    assert "No such file" not in seen
    assert seen.count(f"/root/{mark}") == seen.count(f"/cwd/../{mark}") > 2


async def test_memory_of_outside_processes_is_unreachable(container: LocalContainer) -> None:
    """Numbers of processes outside mean nothing or something else inside, whichever call is given them."""
    script = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call in (lambda pid: os.pidfd_open(pid), lambda pid: os.kill(pid, 0), lambda pid: open(f"/proc/{{pid}}/mem", "rb")):
    for pid in {sorted({os.getpid(), os.getppid()} - {1})}:  # number 1 is the container's own, inside
        try:
            call(pid)
            print("reached", pid)
        except OSError as error:
            print(type(error).__name__)
"""
    inside = await output(container, "ls /proc")
    assert str(os.getpid()) not in inside.split()
    assert set((await python(container, script)).split()) == {"ProcessLookupError", "FileNotFoundError"}


async def test_channels_of_other_boxes_are_invisible(container: LocalContainer) -> None:
    async with local_container() as other:
        channels = other._directory.path / "channels"
        assert channels.is_dir()
        assert "No such file" in await output(container, f"ls {channels}")
        assert channels.parent.name not in await output(container, f"ls -A {channels.parent.parent}")
        (channels / "of-another").touch()
        seen = (await output(container, "ls /run/ares_exp")).split()  # a shell that is being opened has two more
        assert "serve" in seen
        assert "of-another" not in seen


@pytest.mark.parametrize(
    "attack",
    [
        "rm -rf /run/ares_exp/* /run/ares_exp",
        "mv /run/ares_exp /tmp/x",
        "mv /run /tmp/run",
        "ln -sf /etc/passwd /run/ares_exp/2.out",
        "echo 'echo pwned' >/run/ares_exp/serve",
        "rm -rf /run",
        "chmod 777 /run/ares_exp/serve",
        "mkfifo /run/ares_exp/99.in",
        "echo 'x y z' >/proc/1/fd/0",  # its own first process may be talked to, by whoever is root in the container
    ],
)
async def test_channels_survive_attacks_from_inside(container: LocalContainer, attack: str) -> None:
    before = {path: path.read_bytes() for path in (ROOT / "pyproject.toml", Path("/etc/passwd"))}
    await output(container, attack)
    for number in range(3):
        assert await output(container, f"echo {number}") == f"{number}\n"
    assert {path: path.read_bytes() for path in before} == before
