from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ares_exp.containers.images.docker_cli import docker_build, docker_clis
from ares_exp.containers.images.shared_work import Demand, WorkAbandoned

HOST = "unix:///no/such.sock"


def program(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def build(cli: Path, arguments: Sequence[str], demand: Demand, on_line: Callable[[str], None]) -> int:
    (cli.parent / "Dockerfile").write_text("FROM x\n")
    context = cli.parent
    return docker_build(cli, "FROM x\n", arguments, context_dir=context, host=HOST, demand=demand, on_line=on_line)


def output(cli: Path, *arguments: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    return build(cli, arguments, Demand(), lines.append), lines


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"  # nobody has reaped it yet
    except (FileNotFoundError, ProcessLookupError):  # it may end as its file is read
        return not Path("/proc/self").exists()


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)


def test_arguments_output_and_exit_code(tmp_path: Path) -> None:
    script = (
        'printf "%s|" "$1" "$2" "$4" "$5"; echo; echo to stderr >&2; cat; cat "$6/Dockerfile" "${3#--file=}"; exit 7'
    )
    expected = ["build|--progress=plain|a b|$HOME '\"|", "to stderr", "FROM x", "FROM x"]
    assert output(program(tmp_path, script), "a b", "$HOME '\"") == (7, expected)


def test_it_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///another.sock")
    monkeypatch.setenv("DOCKER_CONFIG", "/its/config")
    _, lines = output(program(tmp_path, "env"))
    assert {f"DOCKER_HOST={HOST}", "DOCKER_CONFIG=/its/config", "DOCKER_BUILDKIT=1"} <= set(lines)
    assert not [line for line in lines if "secret" in line]


def test_an_overlong_line_comes_in_pieces(tmp_path: Path) -> None:
    _, lines = output(program(tmp_path, "head -c 10000 /dev/zero | tr '\\0' x; echo; echo next"))
    assert lines[-1] == "next"
    assert max(map(len, lines)) <= 4096
    assert sum(map(len, lines)) == 10_004


def test_it_ends_with_the_demand_and_takes_its_children_along(tmp_path: Path) -> None:
    cli = program(tmp_path, "sleep 1000 & echo $!; wait")
    demand, child = Demand(), []

    def on_line(line: str) -> None:
        child.append(int(line))
        threading.Thread(target=demand.end).start()

    with pytest.raises(WorkAbandoned):
        build(cli, [], demand, on_line)
    wait_for_the_end_of(child[0])


def test_it_does_not_start_to_run_when_the_demand_is_over_already(tmp_path: Path) -> None:
    demand = Demand()
    demand.end()
    with pytest.raises(WorkAbandoned):
        build(program(tmp_path, "sleep 1000"), [], demand, print)


def test_it_ends_with_a_killed_runner(tmp_path: Path) -> None:
    cli = program(tmp_path, "sleep 1000 & echo $!; wait")
    code = (
        "from pathlib import Path\n"
        "from tests.docker.test_docker_cli import build, Demand\n"
        f"build(Path({str(cli)!r}), [], Demand(), lambda line: print(line, flush=True))\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env, cwd=root) as runner:
        assert runner.stdout is not None
        child = int(runner.stdout.readline())
        assert alive(child)
        assert list(temporary.iterdir())
        runner.send_signal(signal.SIGKILL)
    wait_for_the_end_of(child)
    assert not list(temporary.iterdir())


def test_every_command_on_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = program(tmp_path / "a", ""), program(tmp_path / "b", "")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "docker").symlink_to(first)
    program(tmp_path / "c", "").chmod(0o644)
    (tmp_path / "d" / "docker").mkdir(parents=True)
    folders = [tmp_path / name for name in ("a", "link", "gone", "c", "d", "b")]
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", *map(str, folders)]))
    monkeypatch.chdir(tmp_path / "a")
    assert list(docker_clis()) == [first, second]
