import asyncio
import contextlib
import os
import threading
from pathlib import Path

import docker
import pytest

from ares_exp import errors
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from tests.docker.conftest import exists
from tests.docker.dockerfiles import IMAGE, built

pytestmark = pytest.mark.docker

SPEC = ContainerSpec("docker test", docker_image=IMAGE)


@pytest.mark.parametrize(
    "delay", [0.0, 0.06, *(pytest.param(delay, marks=pytest.mark.nightly) for delay in (0.02, 0.15, 0.3))]
)
async def test_cancelled_start_leaves_no_container(engine: docker.DockerClient, delay: float) -> None:
    box = DockerContainerFactory()(SPEC)
    start = asyncio.create_task(box.start())
    await asyncio.sleep(delay)
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
        await box.stop()  # it was faster
    assert not exists(engine, box.container_name)


async def test_late_start_leaves_no_container(engine: docker.DockerClient) -> None:
    box = DockerContainerFactory()(ContainerSpec("late", docker_image=IMAGE, start_timeout_sec=0.02))
    with pytest.raises(
        errors.EnvironmentStartTimeoutError,
        match=r"late did not start within 0\.02 s\. Set `timeouts\.build_multiplier=2`",
    ):
        await box.start()
    assert not exists(engine, box.container_name)


async def test_stop_removes_the_container(engine: docker.DockerClient) -> None:
    async with DockerContainerFactory()(SPEC) as box:
        labels = engine.api.inspect_container(box.container_name)["Config"]["Labels"]
    assert not exists(engine, box.container_name)
    assert labels["ares_exp.pid"] == str(os.getpid())
    assert all(labels[f"ares_exp.{name}"] for name in ("run", "host", "process-start"))


async def test_task_env_overrides_the_factory_env() -> None:
    spec = ContainerSpec("env", docker_image=IMAGE, env={"A": "task"})
    async with DockerContainerFactory(env={"A": "factory", "B": "factory"})(spec) as box:
        assert (
            await box.exec("echo $A $B; tr '\\0' '\\n' < /proc/1/environ | grep ^A=")
        ).output == "task factory\nA=task\n"


async def test_setuid_processes_are_killed(context: Path) -> None:
    spec = built(context, "RUN cp /usr/bin/perl /bin/as-root && chmod 4755 /bin/as-root\nUSER nobody\n")
    sleeper = "as-root -e '$< = 0; $> = 0; print qq(uid $<\\n); $| = 1; print qq(up\\n); sleep 4323'"
    async with DockerContainerFactory()(spec) as box:
        late = await box.exec(f"{sleeper} & {sleeper}", timeout_sec=5.0)
        assert late.timed_out
        assert late.output.count("uid 0\n") == 2
        left = await box.exec("cat /proc/[0-9]*/stat | grep -c '(as-root) [^ZX]'", user="root", shell="sh -c")
        assert left.output.split()[-1] == "0"


async def test_shell_option_selects_a_login_shell(context: Path) -> None:
    spec = built(context, "ENV PATH=/opt/mine:$PATH\n")
    async with DockerContainerFactory()(spec) as plain, DockerContainerFactory(shell="bash -lc")(spec) as login:
        assert (await plain.exec("echo $PATH")).output.startswith("/opt/mine:")
        assert "/opt/mine" not in (await login.exec("echo $PATH")).output


async def test_output_of_a_failed_entrypoint_is_shown(context: Path) -> None:
    spec = built(context, 'ENTRYPOINT ["sh", "-c", "echo I serve nobody; exit 3"]\n')
    with pytest.raises(errors.ContainerStartError, match="I serve nobody"):
        await DockerContainerFactory()(spec).start()


def test_check_reports_unsupported_specs(tmp_path: Path) -> None:
    check = DockerContainerFactory().check
    (tmp_path / "environment").mkdir()
    spec = ContainerSpec("t", context_dir=tmp_path / "environment")
    with pytest.raises(errors.TaskError, match=r"nor a Dockerfile in .*environment"):
        check(spec)
    with pytest.raises(errors.TaskError, match="nor a Dockerfile"):
        check(ContainerSpec("t"))
    (tmp_path / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\n")
    assert check(spec) == []
    assert "storage_mb=10" in check(ContainerSpec("t", docker_image=IMAGE, storage_mb=10))[0]
    with pytest.raises(errors.UnsupportedTaskError, match="GPUs"):
        check(ContainerSpec("t", docker_image=IMAGE, gpus=1))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("unix:///no/such.sock", "No Docker engine responds at unix:///no/such.sock"),
        (
            "tcp://127.0.0.1:1",
            r"No Docker engine responds at tcp://127.0.0.1:1: \[Errno \d+\] Connection refused\. Start",
        ),
        ("ssh://somewhere", "Expected DOCKER_HOST to be"),
    ],
)
async def test_missing_engine_is_reported(monkeypatch: pytest.MonkeyPatch, host: str, message: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(errors.PreflightError, match=message):
        await DockerContainerFactory().preflight()
    with pytest.raises(errors.ContainerStartError, match=message):
        await DockerContainerFactory()(SPEC).start()


def test_containers_on_several_event_loops() -> None:
    outputs: list[str] = []

    async def run() -> None:
        async with DockerContainerFactory()(SPEC) as box:
            outputs.append((await box.exec("echo $HOSTNAME")).output)

    threads = [threading.Thread(target=lambda: asyncio.run(run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(outputs)) == 3
