"""Artifacts and collect hooks of services next to the agent's container."""

import json
from pathlib import Path

import pytest

from ares_exp.containers.container import ComposedContainer
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.errors import ContainerDiedError
from ares_exp.tasks.harbor_task import load_task
from tests.compatibility.case import write_task
from tests.docker.compose_tasks import IMAGE, needs_compose

pytestmark = [pytest.mark.docker, pytest.mark.once, needs_compose]

TOML = f"""
artifacts = [
    {{source = "/data", service = "db", exclude = ["*.tmp"]}},
    {{source = "/app/x.txt", service = "main"}},
    {{source = "/logs/artifacts/x", service = "db"}},
    {{source = "/done/file", service = "done"}},
    {{source = "/none", service = "web"}},
]
[environment]
docker_image = "{IMAGE}"
[verifier]
environment_mode = "separate"
[[verifier.collect]]
service = "db"
command = "echo hook >> /data/rows"
[[verifier.collect]]
command = "mkdir -p /app; echo main > /app/x.txt"
[[verifier.collect]]
service = "done"
command = "true"
"""
COMPOSE = f"""services:
  db:
    image: {IMAGE}
    command: ["sh", "-c", "mkdir /data; echo row > /data/rows; touch /data/a.tmp; sleep infinity"]
  done:
    image: {IMAGE}
    command: ["sh", "-c", "mkdir /done; echo done > /done/file"]
"""


async def test_services_are_collected_after_main_has_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"task.toml": TOML, "environment/docker-compose.yaml": COMPOSE, "environment/Dockerfile": None}
    task = load_task(write_task(tmp_path / "task", files))
    task.check_runnable()
    async with DockerContainerFactory()(task.container_spec) as box:
        assert isinstance(box, ComposedContainer)
        await task.set_up(box)
        await task.stages[0].collect(box, tmp_path / "out")
        with pytest.raises(ContainerDiedError):
            await box.exec("true")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(entry["source"], entry["service"], entry["status"]) for entry in manifest] == [
        ("/logs/artifacts", None, "empty"),
        ("/app/x.txt", "main", "ok"),
        ("/data", "db", "ok"),
        ("/logs/artifacts/x", "db", "skipped"),
        ("/done/file", "done", "ok"),
        ("/none", "web", "failed"),
    ]
    assert (tmp_path / "out" / "app" / "x.txt").read_text() == "main\n"
    assert (tmp_path / "out" / "data" / "rows").read_text() == "row\nhook\n"
    assert not (tmp_path / "out" / "data" / "a.tmp").exists()
    assert (tmp_path / "out" / "done" / "file").read_text() == "done\n"
    assert "The collect hook `true` in done failed" in caplog.text
