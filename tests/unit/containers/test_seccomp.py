"""The filter as a program: interpreted here for each architecture, since only one of them can be run."""

from __future__ import annotations

import errno
import struct

import pytest

from ares_exp.containers.local.isolation import compiled_filter

ALLOW, ERROR = 0x7FFF0000, 0x00050000
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
NEW_USER_NAMESPACE = 0x10000000


def verdict(machine: str, architecture: int, number: int, first_argument: int = 0) -> int:
    """Runs the classic BPF program on one system call."""
    code = compiled_filter(machine)
    assert code is not None
    program = list(struct.iter_unpack("<HBBI", code))
    data = {0: number, 4: architecture, 16: first_argument & 0xFFFFFFFF}
    position = accumulator = 0
    while True:
        operation, if_true, if_false, operand = program[position]
        position += 1
        if operation == 0x20:
            accumulator = data[operand]
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            position += if_true if holds[operation] else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "keyctl", "bpf", "clone", "unshare", "read", "socket"),
    [("x86_64", X86_64, 250, 321, 56, 272, 0, 41), ("aarch64", AARCH64, 219, 280, 220, 97, 63, 198)],
)
def test_verdicts(
    machine: str, architecture: int, keyctl: int, bpf: int, clone: int, unshare: int, read: int, socket: int
) -> None:
    denied, not_here = ERROR | errno.EPERM, ERROR | errno.ENOSYS
    assert verdict(machine, architecture, read) == ALLOW
    assert verdict(machine, architecture, keyctl) == denied
    assert verdict(machine, architecture, bpf) == denied
    assert verdict(machine, architecture, 435) == not_here
    for number in (clone, unshare):
        assert verdict(machine, architecture, number, 0x11) == ALLOW
        assert verdict(machine, architecture, number, NEW_USER_NAMESPACE | 0x11) == denied
    assert verdict(machine, architecture, socket, 40) == denied
    assert verdict(machine, architecture, socket, 2) == ALLOW
    assert verdict(machine, architecture, read, 40) == ALLOW
    assert verdict(machine, architecture, read, NEW_USER_NAMESPACE) == ALLOW
    assert verdict(machine, I386, read) == not_here
    assert verdict(machine, architecture, read | 0x40000000) == not_here


def test_no_filter_where_the_numbers_are_unknown() -> None:
    assert compiled_filter("riscv64") is None
