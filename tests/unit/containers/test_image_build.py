"""The choice of a builder, and `docker build`, with programs in place of the real command."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.docker.docker_cli import docker_clis
from ares_exp.containers.docker.engine import Capabilities, Engine
from ares_exp.containers.docker.image import build_image, check_buildable, find_buildkit, find_buildkit_feature
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError
from tests.leaks import is_alive, wait_until

NO_API: Any = None
ENGINE = Engine("unix:///no/such.sock", NO_API, Capabilities())
PLUGIN = '[ "$1" = buildx ] && { echo github.com/docker/buildx v0.17; exit; }'


def program(folder: Path, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def build(folder: Path, script: str, child: ChildProcess | None = None) -> None:
    """Builds the context `folder` with a `docker` command that runs a script."""
    cli = program(folder / "bin", f"{PLUGIN}\n{script}")
    os.environ["PATH"] = f"{cli.parent}{os.pathsep}{os.environ['PATH']}"
    build_image(ENGINE, "tag", folder, {"a": "$HOME '"}, child or ChildProcess())


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nRUN echo hi && \\\n  echo there\nCOPY here.txt /x\n",
        "# syntax=docker/dockerfile:1\nFROM a AS b\nFROM c\nCOPY --from=b /gone /x\n",
        'FROM a\nCOPY ["here.txt", "/x"]\nENTRYPOINT ["sh"]\nHEALTHCHECK --interval=1s CMD true\n',
        'FROM a\nRUN echo "<< no here-document" && cat <<< word\n',
        "FROM a\nRUN echo $((1<<2)) $(( 1 <<2 ))\nRUN bash -c \"cat <<EOF\"\nRUN echo ' <<EOF'\n",
        "FROM a\nRUN echo \\\n\n  # COPY --chmod=1 x y\n  go && echo --mount=type=cache\n",
        "FROM --platform=linux/amd64 a\nARG TARGETARCH=amd64\nARG OTHER\nCOPY --chown=1:1 here.txt /x\n",
        "# comment\n# syntax=example.test/nix:1\nFROM a\n",
    ],
)
def test_plain_dockerfile_needs_no_buildkit(text: str) -> None:
    assert find_buildkit_feature(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN <<EOF\nFOO\nEOF\nRUN true\n", (2, "a here-document")),
        ("FROM a\n\nCOPY <<'E' <<-F /x\nls\nE\nFOO\n\tF\nUSER 1\n", (3, "a here-document")),
        ("FROM a\nRUN true && \\\n\n  cat <<E-1 > /x\nRUN --mount=x y\nE-1\n", (2, "a here-document")),
        ("FROM a\nRUN cat > /x << 'E F' && ls\nFOO\nE F\nRUN true\n", (2, "a here-document")),
        ("FROM a\nRUN --network=none --mount=type=cache,target=/c ls\n", (2, "RUN --network")),
        ("FROM a\nrun  --security=insecure ls\n", (2, "RUN --security")),
        ("FROM a\nCOPY --chown=1 --chmod=755 here.txt /x\n", (2, "COPY --chmod")),
        ("FROM a\nADD --checksum=sha256:0 http://x.test/y /y\n", (2, "ADD --checksum")),
        ("FROM --platform=$BUILDPLATFORM a\n", (1, "the value of BUILDPLATFORM")),
        ("FROM a\nARG X=1 TARGETARCH\n", (2, "the value of TARGETARCH")),
        ("# escape=\\\n#Syntax = example.test/nix:1\nANYTHING\n", (2, "the frontend example.test/nix:1")),
        ("# syntax=docker/dockerfile-other\n", (1, "the frontend docker/dockerfile-other")),
    ],
)
def test_buildkit_feature_is_found_with_its_line(text: str, expected: tuple[int, str]) -> None:
    assert find_buildkit_feature(text) == expected


def test_dockerfile_without_a_builder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = program(tmp_path / "broken", "echo I do not.; exit 1")
    bare = program(tmp_path / "bare", '[ "$1" = version ] && echo 28.0.0')
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{bare.parent}{os.pathsep}/usr/sbin-gone")
    dockerfile = tmp_path / "Dockerfile"
    with pytest.raises(TaskError, match="Dockerfile"):
        check_buildable(dockerfile, lambda: ENGINE)
    dockerfile.write_text("FROM a\nRUN --mount=type=cache,target=/c true\n")
    with pytest.raises(UnsupportedTaskError) as caught:
        check_buildable(dockerfile, lambda: ENGINE)
    for part in (f"{dockerfile}:2: RUN --mount needs BuildKit", f"({broken}, {bare})", "Install docker-buildx"):
        assert part in str(caught.value)
    old = program(tmp_path / "old", '[ "$1" = version ] && echo 20.10.24+dfsg1')
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{old.parent}")
    assert find_buildkit(ENGINE) == old
    check_buildable(dockerfile, lambda: ENGINE)
    assert find_buildkit(Engine(ENGINE.host, NO_API, Capabilities(is_podman=True))) is None


def test_failed_build_shows_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///another.sock")
    monkeypatch.setenv("DOCKER_CONFIG", "/its/config")
    script = (
        'seq 1000; printf "%s|" "$@"; echo; env | grep -E "^(DOCKER|OPENAI)" | sort; cat; '
        "head -c 10000 /dev/zero | tr '\\0' x; echo; printf '\\033[31mto stderr\\033[2J\\n' >&2; exit 7"
    )
    with pytest.raises(ContainerStartError) as caught:
        build(tmp_path, script)
    first, *rest = str(caught.value).splitlines()
    assert first == f"The image of {tmp_path} could not be built: {tmp_path}/bin/docker ended with exit code 7."
    assert f"build|--progress=plain|--tag=tag|--label=a=$HOME '|{tmp_path}|" in rest
    assert ["DOCKER_BUILDKIT=1", "DOCKER_CONFIG=/its/config", f"DOCKER_HOST={ENGINE.host}"] == [
        line for line in rest if line.startswith(("DOCKER", "OPENAI"))
    ]
    assert rest[-1] == "to stderr\N{REPLACEMENT CHARACTER}[2J"
    assert "1000" in rest
    assert "900" not in rest
    assert max(map(len, rest)) <= 501


def started_child(folder: Path) -> int:
    file = folder / "child"
    assert wait_until(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


SLEEPER = "for folder; do :; done; sleep 1000 & echo $! > $folder/child; wait"
"""The script of a command whose last argument is a folder."""


def test_build_ends_with_its_demand(tmp_path: Path) -> None:
    child = ChildProcess()
    ender = threading.Thread(target=lambda: (started_child(tmp_path), child.stop()))
    ender.start()
    with pytest.raises(ChildFailedError):
        build(tmp_path, SLEEPER, child)
    ender.join(60)
    assert wait_until(lambda: not is_alive(started_child(tmp_path)))
    with pytest.raises(ChildFailedError):  # over before it starts
        build(tmp_path, SLEEPER, child)


def test_build_ends_with_a_killed_runner(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from tests.unit.containers.test_image_build import SLEEPER, build\n"
        f"build(Path({str(tmp_path)!r}), SLEEPER)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as runner:
        child = started_child(tmp_path)
        assert is_alive(child)
        runner.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not is_alive(child))


def test_every_command_on_path_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = program(tmp_path / "a", ""), program(tmp_path / "b", "")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "docker").symlink_to(first)
    program(tmp_path / "c", "").chmod(0o644)
    (tmp_path / "d" / "docker").mkdir(parents=True)
    folders = [tmp_path / name for name in ("a", "link", "gone", "c", "d", "b")]
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", *map(str, folders)]))
    monkeypatch.chdir(tmp_path / "a")
    assert list(docker_clis()) == [first, second]
