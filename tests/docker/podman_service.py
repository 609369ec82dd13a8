"""A separate Podman service for tests, with the images of the Docker engine."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "debian:bookworm-slim"
SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
"""What Podman takes for granted and a machine that is a container itself does not have: systemd, cgroups of version 2
alone, and the right to raise limits."""


def missing_program() -> str | None:
    return next((name for name in ("podman", "runc", "docker") if shutil.which(name) is None), None)


@contextmanager
def podman_service(folder: Path) -> Iterator[str]:
    """Its address."""
    settings, socket = folder / "containers.conf", folder / "podman.sock"
    settings.write_text(SETTINGS)
    env = {**os.environ, "CONTAINERS_CONF": str(settings)}
    if subprocess.run(["podman", "image", "exists", IMAGE], env=env, check=False).returncode:
        archive = folder / "image.tar"
        subprocess.run(["docker", "save", "--output", str(archive), IMAGE], check=True)
        subprocess.run(["podman", "load", "--quiet", "--input", str(archive)], env=env, check=True)
        archive.unlink()
    command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
    with (folder / "podman.log").open("wb") as log:
        service = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while not socket.exists():
            if service.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "podman.log").read_text())
            time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        service.terminate()
        service.wait(30)
