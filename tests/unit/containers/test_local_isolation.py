"""Tries to get out of a local container. Runs as root and as an ordinary user."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.container_files import _hidden_in_etc
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local


@pytest.fixture
async def container() -> AsyncIterator[LocalContainer]:
    async with local_container(network=PUBLIC) as started:
        yield started


async def output(container: LocalContainer, command: str) -> str:
    return (await container.exec(command, timeout_sec=20)).output


async def test_secrets_in_etc_are_hidden(container: LocalContainer) -> None:
    private = [path for path in Path("/etc").rglob("*") if path.is_file() and not path.stat().st_mode & 0o004]
    assert private, "a host without a shadow file?"
    for path in private:
        text = await output(container, f"cat {path} 2>/dev/null")
        assert not text or text.startswith(("root:*:", "root:*")), path
    assert "$" not in await output(container, "cat /etc/shadow /etc/gshadow")


async def test_secrets_in_etc_are_hidden_without_whiteouts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError  # as an overlay does

    monkeypatch.setattr(os, "mknod", refuse)
    hidden = [path for path in _hidden_in_etc() if not path.name.endswith("shadow")]
    assert hidden, "this machine has something to hide"
    tests = "\n".join(f"[ ! -s {path} ] || echo {path}" for path in hidden)  # a directory has a size
    async with local_container() as container:
        seen = (await container.exec(f"{tests}\ntrue")).output
    assert seen == ""


async def test_host_users_are_hidden(container: LocalContainer) -> None:
    ids = [int(line.split(":")[2]) for line in (await output(container, "cat /etc/passwd")).splitlines()]
    assert 0 in ids
    assert all(uid < 1000 or uid in (65533, 65534) for uid in ids)


async def test_signals_do_not_reach_the_host(container: LocalContainer) -> None:
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    await output(container, f"kill -9 {sleeper.pid} {os.getpid()} {os.getppid()}; kill -9 -1")
    await asyncio.sleep(0.05)
    assert sleeper.returncode is None
    sleeper.kill()
    await sleeper.wait()
    await sleeper.wait()


async def test_kernel_settings_are_read_only(container: LocalContainer) -> None:
    for path in ("sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches", "sysrq-trigger"):
        write = f"echo x >/proc/{path}"
        assert (await container.exec(write)).exit_code != 0
        remount = f"mount -o remount,rw,bind /proc/{path}; mount -o remount,rw /proc; umount -l /proc/sys; {write}"
        assert (await container.exec(remount)).exit_code != 0


async def test_privileged_operations_are_refused(container: LocalContainer) -> None:
    commands = [
        *("mount -t tmpfs x /mnt", "mount --bind /usr /mnt", "mount -t proc proc /mnt", "mount -t sysfs sys /mnt"),
        *("mount -t cgroup2 cg /mnt", "umount /etc", "umount /proc/sys", "mount -o remount,rw /run/ares_exp"),
        *("touch /run/ares_exp/x", "mknod /tmp/null c 1 3", "mknod /tmp/disk b 8 0", "chroot /usr true"),
        *("chroot / true", "unshare --user --map-root-user true", "unshare --mount true", "unshare --net true"),
        *("nsenter --target 1 --mount --net true", "hostname other", "date --set '2001-01-01'"),
        *("ip link add dummy0 type dummy", "cat /dev/kmsg", "cat /dev/mem", "cat /proc/kcore | head -c 1 | grep ."),
        *("cat /proc/kmsg", "dmesg", "ls /sys/kernel", "ls /dev/sda /dev/vda /dev/nvme0n1 /dev/kvm /dev/fuse"),
        "ls /var/run/docker.sock /run/docker.sock /run/dbus /run/systemd/private",
    ]
    codes = {command: (await container.exec(command, timeout_sec=60)).exit_code for command in commands}
    assert [command for command, code in codes.items() if code in (0, None)] == []


async def test_writes_remain_in_the_box(container: LocalContainer) -> None:
    name = f"ares-escape-{os.getpid()}"
    places = [
        *("/etc", "/usr", "/usr/bin", "/usr/local/bin", "/tmp", "/var/tmp", "/root", "/home", "/run", "/dev/shm"),
        "/var/lib",
    ]
    for place in places:
        await output(
            container, f"echo x >{place}/{name}; echo x >/proc/self/root{place}/{name}-2; echo x >/proc/1/root/{name}"
        )
    await output(container, f"ln -s / /tmp/link; echo x >/tmp/link/../../../{name}; rm -rf /etc/hosts /usr/bin/env")
    seen = [place for place in places if os.access(place, os.X_OK)]  # an ordinary user cannot look into /root
    assert [place for place in seen for suffix in ("", "-2") if Path(place, name + suffix).exists()] == []
    assert not Path("/", name).exists()
    assert Path("/etc/hosts").exists()
    assert Path("/usr/bin/env").exists()


ASK = "import socket; print(socket.create_connection(('127.0.0.1', {}), 15).recv(9))"


async def test_system_calls_are_filtered(container: LocalContainer) -> None:
    script = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = dict(keyctl=250, add_key=248, bpf=321, userfaultfd=323, io_uring_setup=425, perf_event_open=298)
arm = dict(keyctl=219, add_key=217, bpf=280, userfaultfd=282, io_uring_setup=425, perf_event_open=241)
for name, number in (calls if x86 else arm).items():
    libc.syscall(number, 0, 0, 0, 0, 0)
    print(name, errno.errorcode[ctypes.get_errno()])
libc.syscall(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0)
print("clone", errno.errorcode[ctypes.get_errno()])
libc.syscall(435, 0, 0)
print("clone3", errno.errorcode[ctypes.get_errno()])
"""
    seen = await output(container, f"python3 - <<'EOF'\n{script}\nEOF")
    answers = dict(line.split() for line in seen.splitlines())
    assert answers.pop("clone3") == "ENOSYS"
    assert len(answers) == 7
    assert set(answers.values()) == {"EPERM"}


async def test_threads_and_child_processes_work(container: LocalContainer) -> None:
    script = """
import multiprocessing, subprocess, threading
thread = threading.Thread(target=print, args=["thread"])
thread.start()
thread.join()
subprocess.run(["echo", "child"])
multiprocessing.get_context("fork").Pool(2).map(print, ["pool"])
"""
    seen = await output(container, f"python3 -u - <<'EOF'\n{script}\nEOF")
    assert set(seen.split()) == {"thread", "child", "pool"}


@pytest.mark.parametrize(
    ("options", "task", "phase", "answer"),
    [
        ({"network": "public"}, PUBLIC, PUBLIC, "b'hello"),
        ({}, PUBLIC, PUBLIC, "ConnectionRefusedError"),
        ({"network": "public"}, NO_NETWORK, NO_NETWORK, "ConnectionRefusedError"),
        ({"network": "public"}, PUBLIC, NO_NETWORK, "ConnectionRefusedError"),  # which `check` refuses
    ],
)
async def test_public_network_needs_both_settings(
    greeting_port: int, options: dict[str, Any], task: NetworkPolicy, phase: NetworkPolicy, answer: str
) -> None:
    spec = ContainerSpec(name="t", network=task, phase_networks=frozenset({phase}))
    async with LocalContainerFactory(**options)(spec) as container:
        assert answer in await output(container, f'python3 -c "{ASK.format(greeting_port)}"')
        servers = await output(container, "cat /etc/resolv.conf")
    assert servers == (Path("/etc/resolv.conf").read_text() if answer == "b'hello" else "")


@pytest.mark.root
async def test_other_user_in_the_box_gains_no_privileges() -> None:
    async with local_container() as container:
        result = await container.exec("su -c id root; sudo -n id; mount -t tmpfs x /tmp", user="nobody", timeout_sec=20)
    assert "uid=0" not in result.output


async def test_two_boxes_are_invisible_to_each_other() -> None:
    async with local_container() as one, local_container() as two:
        await one.exec("echo x >/tmp/x; echo x >/dev/shm/x; ipcmk -M 100; (sleep 77 &)")
        assert await output(two, "ls /tmp /dev/shm -A | grep -v : | grep .; ipcs -m | grep 0x") == ""
        assert "sleep 77" not in await output(two, "cat /proc/*/cmdline | tr '\\0' ' '")
