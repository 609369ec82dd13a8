import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import NotFound

from ares_exp.containers.docker.compose.tool import find_compose
from ares_exp.errors import PreflightError
from tests.docker.private_engine import private_engine, the_private_engine
from tests.swebench_rows import build_context, make_repository

__all__ = ["private_engine", "the_private_engine"]


ON_EVERY_PYTHON = ("test_docker_container.py",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine is the same under every Python: most tests run once."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in ON_EVERY_PYTHON:
            item.add_marker(pytest.mark.once)


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture
def api(engine: docker.DockerClient) -> docker.APIClient:
    return engine.api


def exists(engine: docker.DockerClient, name: str) -> bool:
    try:
        engine.api.inspect_container(name)
    except NotFound:
        return False
    return True


@pytest.fixture(scope="session")
def compose() -> None:
    try:
        find_compose()
    except PreflightError as error:
        pytest.skip(f"Docker Compose is not to be had here: {error}")


@pytest.fixture
def context(tmp_path: Path, engine: docker.DockerClient) -> Iterator[Path]:
    """A build context with a unique name; the images that `built` makes of it are removed after the test."""
    directory = tmp_path / f"built-{uuid.uuid4().hex[:8]}"
    directory.mkdir()
    yield directory
    for image in engine.api.images(filters={"label": f"test={directory.name}"}):  # of failed builds too
        engine.api.remove_image(image["Id"], force=True)


@pytest.fixture
def swebench_image(engine: docker.DockerClient, tmp_path: Path) -> Iterator[str]:
    """An image of the repository `tmp_path / "repositories"`, as the published ones of rows."""
    context = build_context(tmp_path, *make_repository(tmp_path / "repositories"))
    dockerfile = (context / "Dockerfile").read_text()
    (context / "Dockerfile").write_text(
        dockerfile.replace(
            "COPY",
            "RUN command -v git || { apt-get update -qq && apt-get install -y -qq --no-install-recommends git; }\nCOPY",
        )
    )
    name = f"ares-exp-test-{uuid.uuid4().hex[:8]}"
    engine.images.build(path=str(context), tag=name, rm=True)
    yield name
    engine.api.remove_image(name, force=True)
