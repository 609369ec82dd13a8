"""Compose files of the tests, and what the engine has of a project."""

from pathlib import Path
from typing import Any

import docker
import pytest

from ares_exp.containers.container import ContainerSpec

IMAGE = "python:3.12-slim"

SERVER = f"""
    image: {IMAGE}
    command: ["sh", "-c", "mkdir /www && cd /www && echo hello > file && exec python3 -m http.server 8000"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('localhost', 8000))"]
      interval: 100ms
      retries: 1000
"""
"""A service that serves `/file`, and is healthy once it does."""

ASK = "python3 -c \"import urllib.request as u; print(u.urlopen('http://{}:8000/file').read().decode())\""


needs_compose = pytest.mark.usefixtures("compose")


def compose_spec(folder: Path, services: str, **asked: Any) -> ContainerSpec:
    """A task whose compose file has these services; `main` from the tests' image unless asked otherwise."""
    file = folder / "docker-compose.yaml"
    file.write_text(f"services:\n{services}")
    plain = {"name": "composed", "docker_image": IMAGE, "context_dir": folder, "compose_file": file}
    return ContainerSpec(**plain | asked)


def things(engine: docker.DockerClient, project: str) -> list[str]:
    """All objects of the engine whose name or label starts with the name of a project."""
    names = [name.lstrip("/") for one in engine.api.containers(all=True) for name in one["Names"] or []]
    names += [one["Name"] for one in engine.api.networks()]
    names += [one["Name"] for one in engine.api.volumes()["Volumes"] or []]
    return sorted(name for name in names if name.startswith(project))
