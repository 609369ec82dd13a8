"""What dead runs left on the engine goes with the next one; what belongs to others stays."""

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import NotFound

from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.leftovers import find
from tests.docker.private_engine import IMAGE, PrivateEngine
from tests.docker.runner import Runner
from tests.leaks import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.once]

MAKER = """
import sys, docker
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.ownership import owner_labels, short_lived_directory
name, image = sys.argv[1:]
client = docker.from_env()
labels = owner_labels()
client.api.create_container(image, ["true"], name=name, labels=labels)
client.networks.create(name, labels=labels)
client.volumes.create(name, labels=labels)
for tag, keep in (("goes", False), ("stays", True)):
    conf = {"Labels": image_labels(f"ares-exp/{name}:{tag}", keep=keep)}
    client.api.commit(name, repository=f"ares-exp/{name}", tag=tag, conf=conf)
print(short_lived_directory("build").path, flush=True)
input()
"""


def start(code: str, *arguments: object) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it printed."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def clean(*options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ares_exp", "clean", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr == ""
    return done


def things(engine: docker.DockerClient, name: str) -> set[str]:
    """What there is of this name."""
    found = {f"container {name}" for one in engine.api.containers(all=True) if f"/{name}" in one["Names"]}
    found |= {f"network {name}" for one in engine.api.networks(names=[name]) if one["Name"] == name}
    found |= {f"volume {name}" for one in engine.api.volumes()["Volumes"] or [] if one["Name"] == name}
    return found | {f"image {tag}" for one in engine.api.images(name=f"ares-exp/{name}") for tag in one["RepoTags"]}


@pytest.fixture
def engine(private_engine: PrivateEngine) -> Iterator[docker.DockerClient]:
    """On the shared one, runs of other people remove what dead runs left, too."""
    with private_engine.client() as client:
        yield client


@pytest.fixture
def name(engine: docker.DockerClient) -> Iterator[str]:
    """Of one of each kind of thing, made by the test; none is left."""
    name = f"ares-exp-test-{uuid.uuid4().hex[:12]}"
    yield name
    for remove in (
        lambda: engine.api.remove_container(name, force=True),
        lambda: engine.api.remove_network(name),
        lambda: engine.api.remove_volume(name),
        lambda: engine.api.remove_image(f"ares-exp/{name}:goes"),
        lambda: engine.api.remove_image(f"ares-exp/{name}:stays"),
    ):
        with contextlib.suppress(NotFound):
            remove()


@pytest.mark.nightly
def test_clean_removes_stale_objects(engine: docker.DockerClient, name: str) -> None:
    stays = {f"image ares-exp/{name}:stays"}
    goes = {f"image ares-exp/{name}:goes", *(f"{kind} {name}" for kind in ("container", "network", "volume"))}
    maker, _ = start(MAKER, name, IMAGE)
    with maker:
        said = clean()
        assert name not in said.stdout
        assert f"of process {maker.pid} on " in said.stdout
        assert things(engine, name) == goes | stays
        maker.kill()
    said = clean("--dry-run")
    lines = [line.partition("  of process ")[0].split() for line in said.stdout.splitlines() if name in line]
    assert {" ".join(words) for words in lines} == goes
    assert f"  of process {maker.pid} on " in said.stdout
    assert " would be removed, which frees up to " in said.stdout
    assert things(engine, name) == goes | stays
    said = clean()
    assert [line for line in said.stdout.splitlines() if name in line and line.endswith(" ago")]
    assert said.returncode == 0
    assert things(engine, name) == stays
    assert name not in clean().stdout
    assert name in clean("--images", "--dry-run").stdout
    assert things(engine, name) == stays


async def test_next_run_removes_objects_of_dead_run(
    engine: docker.DockerClient, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    maker, directory = start(MAKER, name, IMAGE)
    with maker:
        await DockerContainerFactory().preflight()
        assert len(things(engine, name)) == 5
        assert Path(directory).is_dir()
        maker.kill()
    await DockerContainerFactory().preflight()
    assert not Path(directory).exists()
    assert things(engine, name) == {f"image ares-exp/{name}:stays"}


async def test_cached_images_are_stale_only_on_request(engine: docker.DockerClient, name: str) -> None:
    maker, _ = start(MAKER, name, IMAGE)
    with maker:
        maker.kill()
    await DockerContainerFactory().preflight()
    api = (await connect()).api
    try:
        assert not [one for one in find(api) if name in one.name]
        [cached] = [one for one in find(api, cached_images=True) if name in one.name]
        user = engine.api.create_container(cached.name, ["true"])
        try:
            assert "using" in cached.remove()
        finally:
            engine.api.remove_container(user)
        engine.api.tag(cached.name, f"ares-exp/{name}", "mine")
        assert cached.remove() == ""
        assert things(engine, name) == {f"image ares-exp/{name}:mine"}  # the user's own name for it
    finally:
        with contextlib.suppress(NotFound):
            engine.api.remove_image(f"ares-exp/{name}:mine")


async def test_user_objects_from_a_stale_image_are_kept(engine: docker.DockerClient, name: str) -> None:
    """Labels are inherited: the user's containers and images have our labels."""
    maker, _ = start(MAKER, name, IMAGE)
    with maker:
        maker.kill()
    his = f"his-{name}"
    engine.api.create_container(f"ares-exp/{name}:goes", ["true"], name=his)
    engine.api.commit(his, repository=his)
    try:
        assert engine.api.inspect_container(his)["Config"]["Labels"]["ares_exp.pid"] == str(maker.pid)
        await DockerContainerFactory().preflight()
        assert things(engine, his) == {f"container {his}"}
        assert engine.api.inspect_image(his)
    finally:
        engine.api.remove_container(his)
        engine.api.remove_image(his)


async def test_custom_entrypoint_is_removed_by_preflight(engine: docker.DockerClient, context: Path) -> None:
    """It does not read its stdin either, so the container outlives its runner, up to the next run."""
    (context / "Dockerfile").write_text(f'FROM {IMAGE}\nENTRYPOINT ["sh", "-c", "sleep 600"]\n')
    runner = Runner(context=context)
    with runner.process:
        assert runner.line() == "up"
        assert engine.api.inspect_container(runner.name)["State"]["Running"]
        runner.process.kill()
    await DockerContainerFactory().preflight()
    assert wait_until(lambda: not things(engine, runner.name))
