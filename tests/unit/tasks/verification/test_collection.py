"""Artifacts and collect hooks in real containers: out of the agent's, into the verifier's own."""

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.archive import unpack_file
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ContainerDiedError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from tests.unit.tasks.conftest import episode

pytestmark = pytest.mark.local

MakeTask = Callable[..., Path]
SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


async def collected(task: HarborTask, target: Path, *commands: str) -> list[dict[str, Any]]:
    """What the manifest says, of a container in which the commands were run."""
    async with episode(task, LocalContainerFactory()) as box:
        for command in commands:
            result = await box.exec(command)
            assert result.exit_code == 0, result.output
        await task.stages[0].collect(box, target)
    return json.loads((target / "manifest.json").read_text())


def statuses(manifest: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["source"]: entry["status"] for entry in manifest}


async def test_empty_or_missing_default_directory_is_recorded(make_task: MakeTask, tmp_path: Path) -> None:
    assert statuses(await collected(load_task(make_task()), tmp_path / "out")) == {"/logs/artifacts": "empty"}
    gone = await collected(load_task(make_task("gone")), tmp_path / "gone", "rm -r /logs/artifacts")
    assert statuses(gone) == {"/logs/artifacts": "failed"}


async def test_packing_removes_its_temporary_files(
    make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(make_task(toml="artifacts = [{source = '/srv', exclude = ['x']}]"))
    async with episode(task, LocalContainerFactory()) as box:
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        await task.stages[0].collect(box, tmp_path / "out")
        assert (await box.exec("ls -A /tmp")).output == ""
    assert list((tmp_path / "tmp").iterdir()) == []


async def test_uncollectable_artifacts_are_reported(
    make_task: MakeTask, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unpack_file.__kwdefaults__, "max_bytes", 10**6)
    task = load_task(make_task(toml="artifacts = ['/large', '/pipe', '/missing']"))
    with caplog.at_level(logging.WARNING):
        manifest = await collected(task, tmp_path / "out", "truncate -s 5M /large; mkfifo /pipe")
    assert set(statuses(manifest).values()) == {"empty", "failed"}
    told = [record.getMessage() for record in caplog.records]
    assert [message.split()[2] for message in told] == ["/large", "/pipe"]
    assert "5242880 bytes exceed the limit 1000000" in told[0]


async def test_hostile_artifacts_are_filtered(make_task: MakeTask, tmp_path: Path) -> None:
    toml = "artifacts = ['/srv', '/file']"
    made = (
        "cd /srv && mkfifo pipe && ln -s /etc/hostname absolute && ln -s ../../../../etc up && ln -s real inside && "
        "echo x > real && chmod 6777 real && ln -s /etc/hostname /file && rmdir /logs/artifacts && "
        "ln -s /srv /logs/artifacts"
    )
    manifest = await collected(load_task(make_task(toml=toml)), tmp_path / "out", made)
    assert statuses(manifest) == {"/logs/artifacts": "ok", "/srv": "ok", "/file": "ok"}
    root = tmp_path / "out" / "srv"
    assert {path.name for path in root.iterdir()} == {"inside", "real"}
    assert (root / "real").stat().st_mode & 0o7777 == 0o755
    assert not (tmp_path / "out" / "file").is_symlink()


async def test_existing_link_is_not_followed(make_task: MakeTask, tmp_path: Path) -> None:
    task = load_task(make_task(toml="artifacts = ['/srv/deep/x']"))
    (tmp_path / "out" / "srv").mkdir(parents=True)
    (tmp_path / "out" / "srv" / "deep").symlink_to(tmp_path)
    manifest = await collected(task, tmp_path / "out", "mkdir /srv/deep; echo evil > /srv/deep/x")
    assert statuses(manifest)["/srv/deep/x"] == "failed"
    assert not (tmp_path / "x").exists()


async def test_secrets_are_redacted(make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARES_EXP_TEST_KEY", "a-very-secret-value")
    task = load_task(make_task(toml="[environment.env]\nJUDGE_API_KEY = '${ARES_EXP_TEST_KEY}'"))
    await collected(task, tmp_path / "out", 'echo "key: $JUDGE_API_KEY." > /logs/artifacts/log')
    assert (tmp_path / "out" / "logs" / "artifacts" / "log").read_text() == "key: ***.\n"


async def test_task_hooks_run_before_step_hooks(make_task: MakeTask, tmp_path: Path) -> None:
    toml = """
    [[verifier.collect]]
    command = 'echo "$(id -u) task" >> /logs/artifacts/hooks'
    [[steps]]
    name = "one"
    artifacts = ["/hooks.txt"]
    [[steps.verifier.collect]]
    command = 'echo "$(id -u) step" >> /logs/artifacts/hooks; cp /logs/artifacts/hooks /hooks.txt'
    [[steps]]
    name = "two"
    """
    files = {"steps/one/instruction.md": "", "steps/two/instruction.md": ""}
    task = load_task(make_task(toml=toml, files=files))
    await collected(task, tmp_path / "out")
    assert (tmp_path / "out" / "hooks.txt").read_text() == "0 task\n0 step\n"
    assert [item.source for item in task.stages[1].artifacts] == ["/logs/artifacts"]


async def test_hooks_run_without_an_output_directory(make_task: MakeTask) -> None:
    task = load_task(make_task(toml="[[verifier.collect]]\ncommand = 'touch /ran'"))
    async with episode(task, LocalContainerFactory()) as box:
        await task.stages[0].collect(box, None)
        assert (await box.exec("ls /ran")).exit_code == 0


@pytest.mark.parametrize("toml", ["", "[[verifier.collect]]\ncommand = 'true'"])
async def test_stopped_container_is_an_error(make_task: MakeTask, tmp_path: Path, toml: str) -> None:
    task = load_task(make_task(toml=toml))
    async with episode(task, LocalContainerFactory()) as box:
        await box.stop()
        with pytest.raises(ContainerDiedError):
            await task.stages[0].collect(box, tmp_path / "out")


@pytest.mark.docker
@pytest.mark.once
async def test_docker_verifier_gets_the_artifacts(make_task: MakeTask, tmp_path: Path) -> None:
    from ares_exp.containers.docker import DockerContainerFactory

    toml = f"artifacts = [{{source = '/srv', exclude = ['*.log']}}, '/app/x.txt']\n{SEPARATE}"
    task = load_task(make_task(toml=toml))
    (stage,) = task.stages
    async with episode(task, DockerContainerFactory()) as box:
        await box.exec("echo a > /srv/a; echo b > /srv/b.log; echo x > /app/x.txt; echo log > /logs/artifacts/log")
        await stage.collect(box, tmp_path / "out")
    assert stage.verifier_spec is not None
    async with DockerContainerFactory()(stage.verifier_spec) as box:
        await stage.prepare_verifier(box, tmp_path / "out")
        found = await box.exec("cd / && find srv app logs -type f | sort")
    assert found.output.split() == ["app/x.txt", "logs/artifacts/log", "srv/a"]
