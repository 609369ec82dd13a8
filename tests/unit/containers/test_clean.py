"""`ares-exp clean` where there is no Docker engine and no Daytona service.

`tests/docker` and `tests/daytona` have it with one.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ares_exp.containers.local.isolation import find_bwrap, is_privileged
from tests.conftest import missing
from tests.unit.containers.local_containers import STEADY_MOUNTS, needs_local

NO_ENGINE = "Docker was not checked for leftovers. No Docker engine responds at unix:///no/such.sock: "

NO_DAYTONA = {name: value for name, value in os.environ.items() if not name.startswith("DAYTONA_")}

Clean = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clean(tmp_path: Path) -> Clean:
    """Runs the command with `tmp_path` as the directory for temporary files.

    Where bubblewrap works, the command cannot see leftovers of other tests: it has its own `/dev/shm`, and a pid
    namespace from which no cgroup of another run is known to be stale. `mounts` are options of bubblewrap.
    """

    def run(*arguments: str, mounts: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(_alone(mounts) if missing("local") is None else ()),
                sys.executable,
                "-m",
                "ares_exp",
                "clean",
                *arguments,
            ],
            env={**NO_DAYTONA, "TMPDIR": str(tmp_path), "DOCKER_HOST": "unix:///no/such.sock", **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def _alone(mounts: Sequence[str]) -> list[str]:
    """Returns a command line that runs a program as the same user, alone on this machine."""
    user = [] if is_privileged() else ["--unshare-user", "--uid", str(os.getuid()), "--gid", str(os.getgid())]
    memory = ["--perms", "1777", "--tmpfs", "/dev/shm"]
    words = [str(find_bwrap()), *user, "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc"]
    return [*STEADY_MOUNTS, *words, *memory, *mounts, "--"]


def test_clean_without_leftovers_finds_none(clean: Clean) -> None:
    done = clean()
    first, *rest = done.stdout.splitlines()
    assert first.startswith(NO_ENGINE)
    assert rest == ["No leftovers found."]
    assert (done.returncode, done.stderr) == (0, "")


def test_custom_backend_leftovers_are_removed(clean: Clean, tmp_path: Path) -> None:
    (tmp_path / "options" / "container").mkdir(parents=True)
    (tmp_path / "options" / "container" / "mine.yaml").write_text("# mine\n_target_: backend.MineFactory\n")
    (tmp_path / "backend.py").write_text(
        "from ares_exp.containers.container import ContainerFactoryBase\n"
        "from ares_exp.containers.ownership import Leftover\n\n\n"
        "class MineFactory(ContainerFactoryBase):\n"
        "    @classmethod\n"
        "    def find_leftovers(cls, *, images=False, snapshots=False):\n"
        "        yield Leftover('container', 'mine-1', 'run 7', True, None, lambda: '')\n"
    )
    done = clean("--config-dir", str(tmp_path / "options"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine-1  of run 7" in done.stdout
    assert "1 thing removed." in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="there are no local containers elsewhere")
@pytest.mark.local
def test_box_directories_are_removed(clean: Clean, tmp_path: Path) -> None:
    stale, held = tmp_path / "ares_exp-box-123-abc", tmp_path / "ares_exp-box-456-def"
    for directory in (stale, held, tmp_path / "mine"):
        directory.mkdir()
        (directory / "file").write_text("x")
    lock = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = clean("--dry-run")
        line = f"directory      {stale}  of process 123, made "
        kept = "kept       1 thing of process 456: still in use, or cannot be checked from here"
        assert shown.stdout.splitlines()[1].startswith(line)
        assert shown.stdout.splitlines()[2:] == [kept, "1 thing would be removed."]
        assert stale.exists()
        done = clean()
        assert done.stdout.splitlines()[1].startswith(line)
        assert done.stdout.splitlines()[2:] == [kept, "1 thing removed."]
        assert {path.name for path in tmp_path.iterdir()} == {held.name, "mine"}
    finally:
        os.close(lock)
    assert clean().stdout.splitlines()[2:] == ["1 thing removed."]
    assert clean().stdout.splitlines()[1:] == ["No leftovers found."]


@needs_local
def test_undeletable_directory_is_reported(clean: Clean, tmp_path: Path) -> None:
    mount_point = tmp_path / "ares_exp-box-123-abc" / "mounted"
    mount_point.mkdir(parents=True)
    done = clean(mounts=("--tmpfs", str(mount_point)))
    _, found, total = done.stdout.splitlines()
    assert found.endswith(": it is still in use")
    assert (total, done.returncode) == ("0 of 1 thing removed.", 1)
    assert mount_point.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="there are no local containers elsewhere")
def test_directories_closed_by_a_container_are_removed(clean: Clean, tmp_path: Path) -> None:
    box = tmp_path / "ares_exp-box-123-abc"
    for name, mode in (("unwritable", 0o500), ("unreadable", 0)):
        (box / name).mkdir(parents=True)
        (box / name / "file").touch()
        (box / name).chmod(mode)
    done = clean()
    assert (done.stdout.splitlines()[-1], done.returncode) == ("1 thing removed.", 0)
    assert not box.exists()


def test_unused_caches_are_removed_on_request(clean: Clean, tmp_path: Path) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    tasks, swebench = tmp_path / "cache" / "ares_exp" / "tasks", tmp_path / "cache" / "ares_exp" / "swebench"
    for folder in (tasks, swebench):
        (folder / "commits" / "k").mkdir(parents=True)
        (folder / "commits" / "k" / "pack").write_bytes(b"x" * 100_000)
        (folder / "outside").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").touch()
    assert clean(**caches).stdout.endswith("No leftovers found.\n")
    said = clean("--cache", "--dry-run", **caches).stdout
    assert f"{tasks}  of no run (kept for the next run), 10" in said
    assert "2 things would be removed, which frees up to 20" in said

    script = (
        "import signal\n"
        "from ares_exp.containers.user_cache import hold, user_cache_dir\n"
        "hold(user_cache_dir() / 'tasks')\n"
        "print('holds', flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, **caches}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as player:
        assert player.stdout.readline() == "holds\n"
        said = clean("--cache", **caches).stdout
        player.kill()
    assert "1 thing of a process that uses it: still in use" in said
    assert (tasks / "commits" / "k" / "pack").exists()
    assert [*swebench.iterdir()] == []
    assert "1 thing removed." in clean("--cache", **caches).stdout
    assert [*tasks.iterdir()] == []
    assert (tmp_path / "outside" / "mine").exists()
