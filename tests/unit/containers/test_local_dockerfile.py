"""A task's Dockerfile applied in a local container. Runs as root and as an ordinary user."""

from pathlib import Path
from typing import Literal

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.isolation import is_privileged
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import ContainerStartError, TransferError, UnsupportedTaskError
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local


def context(directory: Path, dockerfile: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "Dockerfile").write_text(dockerfile)
    (directory / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (directory / "data" / "deep").mkdir(parents=True)
    (directory / "data" / "deep" / "x").write_text("x\n")
    (directory / "data" / "y").write_text("y\n")
    return directory


async def test_instructions_work_together(tmp_path: Path) -> None:
    dockerfile = """\
FROM debian:bookworm-slim
ARG WHO=world
ENV GREETING="hello $WHO" LATER=no
WORKDIR /app
RUN echo "$GREETING, $WHO, $LATER, $TASK, $PATH, $HOME" >said && pwd >>said
ENV LATER=yes
COPY data/ /data/
COPY tool.sh /usr/local/bin/
COPY --chmod=755 tool.sh /usr/bin/tool
COPY tool.sh data /mixed/
COPY tool.sh /app
RUN ["/bin/sh", "-c", "tool >>said"]
SHELL ["/bin/bash", "-c"]
RUN [[ -n $BASH_VERSION ]] && echo bash >>said
"""
    spec = {"env": {"TASK": "from the task", "GREETING": "good day"}}
    async with local_container(context(tmp_path, dockerfile), **spec) as container:
        said = (await container.exec("cat said")).output.splitlines()
        assert said[0].startswith("hello world, world, no, , /usr/local/sbin:")
        assert said[0].endswith(", /root")
        assert said[1:] == ["/app", "tool", "bash"]
        assert (await container.exec('echo "$GREETING|$LATER|$TASK|$WHO"')).output == "good day|yes|from the task|\n"
        found = "find /data /mixed /app/tool.sh /usr/local/bin/tool.sh -type f | sort | xargs"
        assert (await container.exec(found)).output.split() == [
            *("/app/tool.sh", "/data/deep/x", "/data/y", "/mixed/deep/x", "/mixed/tool.sh", "/mixed/y"),
            "/usr/local/bin/tool.sh",
        ]
        await container.exec("echo up >../up")
        await container.download("../up", tmp_path / "up")
    assert (tmp_path / "up").read_text() == "up\n"


async def test_here_documents_are_executed(tmp_path: Path) -> None:
    dockerfile = """\
FROM debian:bookworm-slim
WORKDIR /app
RUN cat > plain << 'EOF'
it's $HOME
EOF
RUN cat <<-EOF >filled && echo behind >>filled
\t$PWD
\tEOF
RUN <<EOF
echo script >script
EOF
RUN << EOF
#!/usr/bin/env python3
open("python", "w").write("it's python")
EOF
"""
    async with local_container(context(tmp_path, dockerfile)) as container:
        said = (await container.exec("cat plain filled script python; ls /tmp")).output
        assert said == "it's $HOME\n/app\nbehind\nscript\nit's python"


ASK = "python3 -c 'import socket; print(socket.create_connection((\"127.0.0.1\", {}), 10).recv(9).decode())'"


LISTED = NetworkPolicy("allowlist", frozenset({"a.example"}))


@pytest.mark.parametrize(
    ("option", "network"), [("public", NO_NETWORK), ("public", PUBLIC), ("build", PUBLIC), ("build", LISTED)]
)
async def test_build_and_task_have_separate_networks(
    tmp_path: Path, greeting_port: int, option: Literal["public", "build"], network: NetworkPolicy
) -> None:
    ask, names = ASK.format(greeting_port), "cat /etc/resolv.conf"
    dockerfile = f"FROM x\nWORKDIR /app\nRUN {ask} >said && {names} >names && touch /tmp/kept /etc/kept\n"
    spec = ContainerSpec("t", context_dir=context(tmp_path, dockerfile), network=network)
    is_public = network == PUBLIC and option == "public"
    LocalContainerFactory(network=option).check(spec)
    async with LocalContainerFactory(network=option)(spec) as container:
        assert (await container.exec("cat said; ls /tmp/kept /etc/kept")).output == "hello\n/etc/kept\n/tmp/kept\n"
        of_host = Path("/etc/resolv.conf").read_text()
        assert (await container.exec("cat names")).output == of_host
        assert (await container.exec(names)).output == (of_host if is_public else "")
        assert ((await container.exec(ask)).exit_code == 0) is is_public


async def test_build_without_network_suggests_a_remedy(tmp_path: Path, greeting_port: int) -> None:
    task = context(tmp_path / "1", f"FROM x\nRUN {ASK.format(greeting_port)}\n")
    with pytest.raises(
        ContainerStartError,
        match=r"without a network: to give it the network of the host, use container\.network=build",
    ):
        await local_container(task, network=NO_NETWORK).start()
    closed = ContainerSpec("t", context_dir=context(tmp_path / "2", "FROM x\nRUN exit 3\n"), network=NO_NETWORK)
    with pytest.raises(ContainerStartError, match="exit code 3") as caught:
        await LocalContainerFactory(network="public")(closed).start()
    assert "network" not in str(caught.value)


@pytest.mark.root
async def test_user_instruction_sets_the_user(tmp_path: Path) -> None:
    dockerfile = """\
FROM x
RUN useradd --create-home --uid 1234 agent
COPY --chown=agent:agent data /home/agent/data
USER agent
WORKDIR /home/agent
RUN id -un >>/home/agent/who && echo $HOME >>/home/agent/who
"""
    async with local_container(context(tmp_path, dockerfile)) as container:
        seen = await container.exec("cat who; id -u; echo $HOME; stat -c %U data/y; touch /etc/x 2>&1")
        assert seen.output.splitlines()[:5] == ["agent", "/home/agent", "1234", "/home/agent", "agent"]
        assert seen.exit_code != 0
        assert (await container.exec("id -u", user="root")).output == "0\n"


@pytest.mark.skipif(is_privileged(), reason="root's container has other users")
def test_user_instruction_for_ordinary_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTaskError, match="USER agent"):
        LocalContainerFactory().check(ContainerSpec(name="t", context_dir=context(tmp_path, "FROM x\nUSER agent\n")))


async def test_failing_run_shows_line_and_output(tmp_path: Path) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nRUN for i in $(seq 100); do echo line $i; done; echo broken >&2; exit 7\n"
    with pytest.raises(ContainerStartError) as caught:
        await local_container(context(tmp_path, dockerfile)).start()
    message = str(caught.value)
    assert "line 3" in message
    assert "exit code 7" in message
    assert message.endswith("line 100\nbroken")
    assert message.index("without a network") < message.index("Last lines:"), "the remedy comes first"
    assert "line 50\n" not in message


async def test_impossible_copy_fails(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="/proc/sys"):
        await local_container(context(tmp_path, "FROM x\nCOPY data /proc/sys/data\n")).start()
