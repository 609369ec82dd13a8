"""What a container sees where the host's root is made of several mounts, or has no python3."""

import shlex
import sys
from pathlib import Path

import pytest

from ares_exp.containers.local.container_files import _hidden, root_parts, write_layer
from tests.conftest import run_command
from tests.unit.containers.local_containers import ROOT, needs_local

pytestmark = [needs_local, pytest.mark.root]

IN_A_BOX = """
import asyncio, sys
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory

async def main():
    async with LocalContainerFactory()(ContainerSpec(name="x")) as container:
        print((await container.exec(sys.argv[1])).output, end="")

asyncio.run(main())
"""


def on_a_host_with(mount: str, command: str) -> str:
    """Runs `command` in a container, after `mount` in a mount namespace of its own."""
    python = shlex.join([sys.executable, "-B", "-c", IN_A_BOX, command])
    command = ("unshare", "--mount", "sh", "-ec", f"{mount}\nexec {python}")
    run = run_command(command, ROOT, {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_container_without_python3_gets_ours() -> None:
    # Everything that PATH would find first is masked: a device file cannot be executed.
    mask = 'for d in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin; do [ ! -e "$d/python3" ] || '
    mask += 'mount --bind /dev/null "$d/python3"; done'
    if sys.base_prefix == "/usr":
        pytest.skip("the interpreter that runs the tests is the host's own")
    ask = "python3 -c 'import sys; print(sys.version_info[:2], sys.prefix)'; touch $(realpath $(which python3))-x"
    seen = on_a_host_with(mask, f"{ask} 2>/dev/null || echo read-only")
    assert seen == f"{sys.version_info[:2]} {Path(sys.base_prefix).resolve()}\nread-only\n"


def test_host_login_scripts_do_not_slow_down_commands() -> None:
    mount = "mount -t tmpfs x /etc/profile.d; echo 'sleep 5; echo slow' >/etc/profile.d/slow.sh"
    assert "slow" not in on_a_host_with(mount, "ls /etc/profile.d; true")


def test_whiteout_hides_and_our_files_replace(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    write_layer(layer, share_network=False)
    assert (layer / "etc/shadow").read_text().startswith("root:*:")
    assert (layer / "etc/resolv.conf").read_text() == ""
    for path in ("etc", "etc/passwd", "usr/share"):
        assert (layer / path).stat().st_mtime_ns == Path("/", path).stat().st_mtime_ns
    overlays = {part.path: part.sources for part in root_parts(layer, privileged=True) if part.kind == "overlay"}
    assert overlays["/usr"] == ("/usr", str(layer / "usr"))
    assert overlays["/etc"] == ("/etc", str(layer / "etc"))
    assert not {"/root", "/home", "/opt", "/var"} & set(overlays)


def test_file_removed_by_the_host_is_omitted(tmp_path: Path) -> None:
    """As `useradd` does, which writes `/etc/passwd.4711` and renames it."""
    for name in ("a", "b", "c"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "d").mkdir()
    found = _hidden(tmp_path)
    first = next(found)
    for path in tmp_path.iterdir():
        if path != first:
            path.rmdir() if path.is_dir() else path.unlink()
    assert list(found) == []
