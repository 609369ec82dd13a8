"""The seccomp filter of local containers: denied system calls.

Capabilities and namespaces isolate; the filter denies what they leave open to a container whose root is the host's
root: new user namespaces (which bring a fresh set of capabilities, and cgroups to mount), kernel keyrings of the
caller, sockets to the hypervisor (which network namespaces do not cover), and interfaces through which kernels are
usually attacked. The denied calls are a subset of those that Docker's default profile denies; the numbers are from the
kernel's `unistd.h`.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NEW_USER_NAMESPACE = 0x10000000
_X32_BIT = 0x40000000
_VSOCK = 40


@dataclass(frozen=True, slots=True)
class _Calls:
    """System call numbers of one architecture.

    Attributes:
        audit: Its `AUDIT_ARCH_…`.
        denied: add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec_load,
            io_uring_setup, io_uring_enter, io_uring_register.
        clone, unshare: Denied with the flag for a user namespace.
        socket: Denied for the hypervisor's address family.
        clone3: Its flags lie in memory, which a filter cannot read: "not implemented", upon which libc uses clone.
    """

    audit: int
    denied: tuple[int, ...]
    clone: int
    unshare: int
    socket: int
    clone3: int = 435


_ARCHITECTURES = {
    "x86_64": _Calls(
        0xC000003E, (248, 249, 250, 321, 298, 323, 304, 246, 425, 426, 427), clone=56, unshare=272, socket=41
    ),
    "aarch64": _Calls(
        0xC00000B7, (217, 218, 219, 280, 241, 282, 265, 104, 425, 426, 427), clone=220, unshare=97, socket=198
    ),
}


def compiled_filter(machine: str | None = None) -> bytes | None:
    """Returns the filter for `bwrap --seccomp`; `None` on an architecture with unknown numbers.

    Args:
        machine: As `platform.machine()` calls it; default: this one.
    """
    calls = _ARCHITECTURES.get(machine or platform.machine())
    if calls is None:
        return None
    not_here, denied = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM
    program = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, calls.audit), (_RETURN, 0, 0, not_here)),
        *((_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, not_here)),
    ]
    for number, answer in ((calls.clone3, not_here), *((number, denied) for number in calls.denied)):
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    program += [(_IF_EQUAL, 0, 4, calls.socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_IF_EQUAL, 0, 1, _VSOCK), (_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    program += [(_IF_EQUAL, 2, 0, calls.clone), (_IF_EQUAL, 1, 0, calls.unshare), (_RETURN, 0, 0, _ALLOW)]
    program += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_IF_BIT, 0, 1, _NEW_USER_NAMESPACE), (_RETURN, 0, 0, denied)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
