"""The first command of the README on machines that are themselves containers: `docker run` with a Debian image.

The image needs the Python version of the tests, as it uses their packages.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[2]
NIGHTLY = pytest.mark.nightly  # another way into a mode that a case of every run has
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_IMAGES = (f"python:{_VERSION}-slim", "python:3.12-slim", "debian:bookworm-slim")
_UNCONFINED = ("--security-opt", "seccomp=unconfined")
_SYS_ADMIN, _NET_ADMIN = ("--cap-add", "SYS_ADMIN"), ("--cap-add", "NET_ADMIN")
_VOLUME = ("--volume", "/tmp")
HOST = "container=local runs commands directly on this machine, without isolation, as container=host does"
SHARED = "container=local uses namespaces without a private /proc"


def docker_run(options: tuple[str, ...], image: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "run", "--rm", *options, image, *command], capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture(scope="module")
def image() -> str:
    ask = ("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    for name in _IMAGES:
        if docker_run(("--pull", "never"), name, *ask).stdout.strip() == _VERSION:
            return name
    pytest.skip(f"no local image of {', '.join(_IMAGES)} has Python {_VERSION}")


def python(image: str, options: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the Python of the image with this checkout and the packages of the tests."""
    packages = sysconfig.get_path("purelib")
    shown = ("--volume", f"{ROOT}:/ares_exp:ro", "--volume", f"{packages}:/packages:ro")
    settings = ("--env", "PYTHONPATH=/ares_exp:/packages", "--env", "HOME=/tmp", "--workdir", "/tmp")
    return docker_run((*shown, *settings, *options), image, "python3", "-B", *arguments)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        pytest.param((), HOST, id="defaults"),
        pytest.param(_VOLUME, HOST, id="volume", marks=NIGHTLY),
        pytest.param((*_UNCONFINED, *_VOLUME), SHARED, id="without-seccomp"),
        pytest.param((*_SYS_ADMIN, *_VOLUME), HOST, id="sys-admin", marks=NIGHTLY),
        pytest.param((*_SYS_ADMIN, *_NET_ADMIN, *_VOLUME), HOST, id="sys-admin-net-admin", marks=NIGHTLY),
        pytest.param(_UNCONFINED, SHARED, id="without-seccomp-on-overlay", marks=NIGHTLY),
        pytest.param((*_UNCONFINED, *_VOLUME, "--user", "1000"), SHARED, id="user-without-seccomp"),
        pytest.param((*_UNCONFINED, *_SYS_ADMIN, *_NET_ADMIN), None, id="all-namespaces-on-overlay"),
    ],
)
def test_first_command_solves_the_bundled_tasks(image: str, options: tuple[str, ...], mode: str | None) -> None:
    done = python(image, options, "-m", "ares_exp", "tracker=none")
    assert done.returncode == 0, done.stderr
    assert "6 of 6 episodes finished" in done.stdout
    assert "mean reward 1.00" in done.stdout
    modes = [line for line in done.stderr.splitlines() if line.startswith("warning: container=local ")]
    if mode is None:
        assert modes == []
    else:
        assert modes[0].startswith(f"warning: {mode}")
        assert "his machine is itself a container (/.dockerenv exists)" in modes[0]


@pytest.mark.parametrize("container", ["local", pytest.param("host", marks=NIGHTLY)])
def test_ordinary_user_without_namespaces_gets_remedies(image: str, container: str) -> None:
    done = python(image, ("--user", "1000"), "-m", "ares_exp", "tracker=none", f"container={container}")
    assert done.returncode == 2
    for part in ("(/.dockerenv exists)", "/app", "docker run --user 0", "container=docker", "container=daytona"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


_HOLD = """
import asyncio, sys
from ares_exp import LocalContainerFactory
from ares_exp.containers.container import ContainerSpec

async def main():
    async with LocalContainerFactory()(ContainerSpec("t")) as box:
        await box.exec("(setsid sleep 4601 &) & env -i setsid sleep 4602 &")
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""
_WATCH = f"""
import glob, subprocess, sys, tempfile, time

def sleeping():
    found = 0
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            found += open(file, "rb").read() in (b"sleep\\0004601\\0", b"sleep\\0004602\\0")
        except OSError:
            pass
    return found

def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, (sleeping(), left())
        time.sleep(0.05)

def left():
    return glob.glob("/tmp/ares_exp-box-*") + glob.glob("/dev/shm/ares_exp-box-*")

for end in ("stop", "kill"):
    holder = subprocess.Popen([sys.executable, "-c", {_HOLD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\\n"
    wait_for(lambda: sleeping() == 2)
    holder.kill() if end == "kill" else holder.stdin.close()
    holder.wait()
    assert end == "kill" or sleeping() == 0
    wait_for(lambda: sleeping() == 0 and not left())
    print("gone after", end)
"""


def test_shared_process_namespace_leaves_no_process(image: str) -> None:
    done = python(image, _UNCONFINED, "-c", _WATCH)
    assert done.stdout == "gone after stop\ngone after kill\n", done.stdout + done.stderr
