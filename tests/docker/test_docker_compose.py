"""Tasks of several services, with the compose program and the engine of this machine."""

from pathlib import Path

import docker
import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ComposedContainer
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.compose.container import ComposeContainer
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.network_namespace import obstacle
from ares_exp.containers.network_policy import NO_NETWORK, NetworkPolicy
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    SnapshotUnsupportedError,
)
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.tasks.harbor_task import load_task
from ares_exp.testing.host_server import hello_server
from tests.compatibility.case import write_task
from tests.docker.compose_tasks import ASK, IMAGE, SERVER, compose_spec, needs_compose, things

pytestmark = [pytest.mark.docker, pytest.mark.once, needs_compose]


def make(spec: object, **options: object) -> ComposeContainer:
    box = DockerContainerFactory(**options)(spec)  # type: ignore[arg-type]
    assert isinstance(box, ComposeContainer)
    return box


async def test_episode_uses_two_services(tmp_path: Path, engine: docker.DockerClient) -> None:
    files = {
        "task.toml": f'[environment]\ndocker_image = "{IMAGE}"\nenv = {{WHO = "$me"}}\n',
        "environment/Dockerfile": None,
        "environment/docker-compose.yaml": f"services:\n  files:{SERVER}",
        "solution/solve.sh": f'{ASK.format("files")} > /answer && echo "$WHO" >> /answer\n',
        "tests/test.sh": """
            test "$(cat /answer)" = "$(printf 'hello\\n\\n$me')"
            echo $((1 - $?)) > /logs/verifier/reward.txt
        """,
    }
    task, factory = load_task(write_task(tmp_path / "task", files)), DockerContainerFactory()
    task.check_runnable(needs_solution=True)
    assert factory.check(task.container_spec) == []
    env = CodeEnvironment(
        [task], container_factory=factory, code_agent_factory=ShellAgentFactory(), provide_solution=True
    )
    policy = OraclePolicy()
    async with env:
        step = await env.reset()
        while step.observation is not None:
            answer = await policy(step.observation)
            assert isinstance(answer, LLMResponse)
            step = await env.step(answer)
    assert step.reward == 1.0


async def test_services_start_and_are_removed(
    tmp_path: Path, engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_HOST", "secret")
    services = f"""
  main:
    depends_on: {{files: {{condition: service_healthy}}, done: {{condition: service_completed_successfully}}}}
    environment:
      FILE: "a$$b"
      BOTH: file
      SEES: "${{OF_THE_HOST:-nothing}} ${{BOTH}} ${{CPUS}} ${{MEMORY}}"
      OF_THE_HOST:
  files:{SERVER}    container_name: my-files
    ports: ["1:1"]
    working_dir: /opt
    volumes: ["./data:/data:ro", "kept:/kept"]
    environment: {{OWN: "1"}}
  done:
    image: {IMAGE}
    command: "true"
volumes: {{kept: {{name: of-all}}}}
"""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "note").write_text("from the task\n")
    env = {"BOTH": "sp$ec", "PYTHONHOME": "/nowhere"}
    box = make(compose_spec(tmp_path, services, env=env, cpus=1, memory_mb=256, workdir="/srv"))
    async with box:
        assert box.image == IMAGE
        shown = await box.exec("pwd; echo $FILE, $BOTH, $SEES, $PYTHONHOME, $OWN, $OF_THE_HOST")
        assert shown.output.splitlines() == ["/srv", "a$b, sp$ec, nothing sp$ec 1 256M, /nowhere, ,"]
        for name in ("files", "my-files"):
            assert (await box.exec(ASK.format(name), env={"PYTHONHOME": ""})).output.split() == ["hello"]

        assert isinstance(box, ComposedContainer)
        files = box.service("files")
        said = await files.exec("pwd; cat /data/note; echo $OWN $BOTH; (echo no > /data/x) 2>&- || echo read-only")
        assert said.output.splitlines() == ["/opt", "from the task", "1", "read-only"]
        assert (await files.exec("sleep 60", timeout_sec=0.3)).timed_out
        with pytest.raises(ContainerError, match=r"has no service web. It has the services done, files, main"):
            box.service("web")
        with pytest.raises(SnapshotUnsupportedError, match="have separate state"):
            await box.capture_changes(ObjectStore(tmp_path / "objects"))

        await box.service("main").stop()
        with pytest.raises(ContainerDiedError, match="was killed from outside by signal 9"):
            await box.exec("true")
        assert (await files.exec("cat /www/file")).output == "hello\n"
        await files.stop()
        await files.download("/www/file", tmp_path / "downloaded")
        assert (tmp_path / "downloaded").read_text() == "hello\n"

        found = things(engine, box.project_name)
        assert len(found) == 5  # three containers, a network and a volume
        main = next(one for one in found if "main" in one)
        config = engine.api.inspect_container(main)["HostConfig"]
        assert (config["NanoCpus"], config["Memory"], config["PidsLimit"]) == (10**9, 256 << 20, 4096)
        config = engine.api.inspect_container(next(one for one in found if "files" in one))["HostConfig"]
        assert (config["Memory"], config["MemorySwap"]) == (8192 << 20, 8192 << 20)
    assert things(engine, box.project_name) == []
    await box.stop()


async def test_images_are_built(tmp_path: Path, engine: docker.DockerClient) -> None:
    mark = tmp_path.name
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nLABEL test={mark}\nENV PLAIN=1\nWORKDIR /built\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "Its").write_text(
        f"FROM {IMAGE} AS first\nARG WORD=none\nLABEL test={mark}\nRUN echo $WORD > /word\nFROM first\nRUN rm /word\n"
    )
    services = """
  main:
    volumes: ["./other:/other"]
  other:
    build: {context: other, dockerfile: Its, target: first, args: {WORD: "some$$thing"}}
    command: sleep 1000
  same:
    image: ${MAIN_IMAGE_NAME}
    command: sleep 1000
"""
    box = make(compose_spec(tmp_path, services, docker_image=None), keep_image=False, compose_trusted=True)
    async with box:
        assert (await box.exec("ls /other")).output == "Its\n"
        assert (await box.exec("pwd; echo $PLAIN")).output == "/built\n1\n"
        assert (await box.service("other").exec("cat /word")).output == "some$thing\n"
        assert (await box.service("same").exec("echo $PLAIN")).output == "1\n"
        assert box.image.startswith("ares-exp/composed-main:")
    assert not [one for one in engine.api.images(filters={"label": f"test={mark}"}) if one["RepoTags"]]


@pytest.mark.nightly
async def test_scaled_service_has_several_containers(tmp_path: Path, engine: docker.DockerClient) -> None:
    services = f"  web:\n    image: {IMAGE}\n    command: sleep 1000\n    scale: ${{MANY}}\n    mem_limit: ${{MUCH}}\n"
    box = make(compose_spec(tmp_path, services, env={"MANY": "2", "MUCH": "64m"}), compose_max_containers=3)
    async with box:
        webs = [one for one in things(engine, box.project_name) if "web" in one]
        assert len(webs) == 2
        assert {engine.api.inspect_container(one)["HostConfig"]["Memory"] for one in webs} == {64 << 20}
    large = make(compose_spec(tmp_path, services, env={"MANY": "3", "MUCH": "65m"}), compose_max_memory_mb=64)
    with pytest.raises(ContainerStartError, match=r"services\.web\.mem_limit \('?\w+'?, at most 64 MiB"):
        await large.start()
    assert things(engine, large.project_name) == []


async def test_failed_build_leaves_no_container(tmp_path: Path, engine: docker.DockerClient) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nARG WORD\nRUN echo {tmp_path.name} $WORD; exit 3\n")
    services = "  other:\n    build: {context: ., args: {WORD: hello}}\n"
    box = make(compose_spec(tmp_path, services))
    with pytest.raises(ContainerStartError, match=r"The image of service other of task composed could not be built:"):
        await box.start()
    assert not [one for one in engine.api.containers(all=True) if tmp_path.name in one["Command"]]


@pytest.mark.parametrize(
    ("services", "message"),
    [
        (
            f"  web:\n    image: {IMAGE}\n    command: sh -c 'echo I cannot; exit 3'\n",
            r"Service web ended with exit code 3\. It last printed:\nI cannot",
        ),
        (
            f"  web:\n    image: {IMAGE}\n    command: sleep 1000\n    stop_signal: SIGKILL\n"
            "    healthcheck: {test: echo not me; exit 1, interval: 50ms, retries: 1}\n"
            "  main:\n    depends_on: {web: {condition: service_healthy}}\n",
            r"Service web is not healthy. Its health check last printed 'not me'",
        ),
        ("  main:\n    command: [3]\n    nonsense: 1\n    x-nonsense: 1\n", r"services\.main\.nonsense"),
        ("  main:\n    depends_on: [web]\n", r"Docker Compose \S+ rejects this file: .*web"),
    ],
)
async def test_failed_start_leaves_no_containers(
    tmp_path: Path, engine: docker.DockerClient, services: str, message: str
) -> None:
    box = make(compose_spec(tmp_path, services))
    with pytest.raises(ContainerStartError, match=message):
        await box.start()
    assert things(engine, box.project_name) == []


@pytest.mark.nightly
async def test_unready_services_are_named(tmp_path: Path, engine: docker.DockerClient) -> None:
    check = "healthcheck: {test: 'false', interval: 60s}"
    services = f"  web:\n    image: {IMAGE}\n    command: sleep 1000\n    {check}\n"
    for limit in (3, 12, 48):  # on a busy machine the time may be up before there are services
        box = make(compose_spec(tmp_path, services, start_timeout_sec=limit))
        with pytest.raises(EnvironmentStartTimeoutError, match=f"did not start within {limit} s") as caught:
            await box.start()
        assert things(engine, box.project_name) == []
        if "not ready" in str(caught.value):
            break
    assert str(caught.value).endswith(" Services that were not ready: web.")


async def test_mounts_hidden_in_variables_are_rejected_at_start(tmp_path: Path) -> None:
    services = '  main:\n    volumes: ["${WHERE:-/}:/host:ro"]\n'
    spec = compose_spec(tmp_path, services, env={"WHERE": "/root"})
    assert DockerContainerFactory().check(spec) == []
    box = make(spec)
    with pytest.raises(ContainerStartError, match=r"services\.main\.volumes \(/root\)\. .*compose_trusted=true"):
        await box.start()


# What they reach

NO_WAY = tuple(
    f"urllib.error.URLError: <urlopen error {why}"
    for why in ("timed out", "[Errno 101] Network is unreachable", "[Errno 113] No route to host")
)


NAME_SERVER = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:
    question, whose = server.recvfrom(512)
    print(question)
    server.sendto(question[:2] + bytes([0x81, 0x82]) + question[4:], whose)  # it failed
"""


async def test_closed_network_reaches_only_services(tmp_path: Path) -> None:
    services = f"  files:{SERVER}    networks: [inner]\n  main:\n    networks: [inner]\nnetworks: {{inner: }}\n"
    async with hello_server() as (address, port):
        listed = NetworkPolicy("allowlist", frozenset({address}))
        start = listed if obstacle() is None else NO_NETWORK
        box = make(compose_spec(tmp_path, services, network=start, phase_networks=frozenset({NO_NETWORK})))
        code = "import urllib.request as u; print(u.urlopen('http://{}:{}/', timeout={}).read())"
        ask = f'python3 -c "{code}" 2>&1 | tail -1'
        async with box:
            files = box.service("files")
            if start == listed:  # only for main
                assert "hello" in (await box.exec(ask.format(address, port, 45))).output
                assert (await box.exec(ASK.format("files"))).output.split() == ["hello"]
            assert (await files.exec(ask.format(address, port, 0.5))).output.startswith(NO_WAY)
            await box.set_network(NO_NETWORK)
            assert (await box.exec(ask.format(address, port, 0.5))).output.startswith(NO_WAY)
            assert (await box.exec(ASK.format("files"))).output.split() == ["hello"]
            gateway = "$(hostname -i | sed 's/[0-9]*$/1/')"  # where this machine would be on the services' network
            assert (await box.exec(ask.format(gateway, port, 0.5))).output.startswith(NO_WAY)
            # The question for another name goes nowhere: to this container itself.
            ask = "until grep asked /tmp/seen; do timeout 0.5 getent hosts asked.example; done"
            asked = await box.exec(f"touch /tmp/seen; python3 -uc '{NAME_SERVER}' > /tmp/seen & {ask}", timeout_sec=60)
            assert "asked" in asked.output
