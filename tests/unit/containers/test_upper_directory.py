"""Whether an overlay's upper directory is one that may be read, told from files in the form of `/proc`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.docker.capture import find_upper_directory
from ares_exp.errors import SnapshotUnsupportedError

ID = "0123456789abcdef" * 4
ALL_IDS = "         0          0 4294967295\n"


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    upper = tmp_path / "over lay" / "diff"
    upper.mkdir(parents=True)
    return upper


@pytest.fixture
def proc(tmp_path: Path, upper: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a container that may be read."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "42").mkdir()
    (proc / "self" / "status").write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    (proc / "42" / "uid_map").write_text(ALL_IDS)
    mount(proc, f"rw,lowerdir=/l1:/l2,upperdir={upper},workdir=/w".replace(" ", "\\040"))
    return proc


def mount(proc: Path, options: str, kind: str = "overlay") -> None:
    (proc / "42" / "mountinfo").write_text(
        f"72 48 0:39 / / rw,relatime master:2 - {kind} {kind} {options}\n"
        f"92 72 254:0 /docker/containers/{ID}/hostname /etc/hostname rw - ext4 /dev/vda rw\n"
    )


def container(told: Path | None = None) -> dict[str, Any]:
    data = {"GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": str(told)}}} if told is not None else {}
    return {"Id": ID, "State": {"Pid": 42}, **data}


def test_what_the_engine_tells(proc: Path, upper: Path) -> None:
    mount(proc, "rw,upperdir=l/UPPER")  # relative to a directory of the engine's, where the options would be too long
    assert find_upper_directory(container(upper), proc) == upper


def test_what_the_kernel_tells_where_the_engine_does_not(proc: Path, upper: Path) -> None:
    assert find_upper_directory(container(), proc) == upper


def refused(proc: Path, upper: Path) -> str:
    with pytest.raises(SnapshotUnsupportedError) as caught:
        find_upper_directory(container(upper), proc)
    return str(caught.value)


def test_for_an_ordinary_user(proc: Path, upper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in refused(proc, upper)


def test_without_the_right_to_see_the_marks_of_overlays(proc: Path, upper: Path) -> None:
    (proc / "self" / "status").write_text("CapEff:\t00000000a80425fb\n")
    assert "CAP_SYS_ADMIN" in refused(proc, upper)


def test_of_an_engine_elsewhere(proc: Path, upper: Path) -> None:
    text = (proc / "42" / "mountinfo").read_text()
    (proc / "42" / "mountinfo").write_text(text.replace(ID, "f" * 64))
    assert "elsewhere" in refused(proc, upper)
    (proc / "42" / "mountinfo").unlink()
    assert "elsewhere" in refused(proc, upper)


def test_with_mapped_users(proc: Path, upper: Path) -> None:
    (proc / "42" / "uid_map").write_text("         0     100000      65536\n")
    assert "mapped" in refused(proc, upper)


@pytest.mark.parametrize("option", ["redirect_dir=on", "metacopy=on"])
def test_with_files_that_are_partly_elsewhere(proc: Path, upper: Path, option: str) -> None:
    mount(proc, f"rw,upperdir=/x,{option}")
    assert option.partition("=")[0] in refused(proc, upper)


def test_on_another_storage_driver(proc: Path, upper: Path) -> None:
    mount(proc, "rw,subvolid=5", kind="btrfs")
    assert "not an overlay" in refused(proc, upper)


def test_that_is_not_there(proc: Path, upper: Path) -> None:
    upper.rmdir()
    assert "not visible here" in refused(proc, upper)
