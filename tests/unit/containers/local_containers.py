"""Containers for the tests of `container=local`, and the same tests run as an ordinary user."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.local.isolation import find_bwrap, is_privileged

ROOT = Path(__file__).parent.parent.parent.parent
NOBODY = 65534


needs_local = pytest.mark.local
USER = 1234 if is_privileged() else 0
"""A user of local containers: another user than root, if this process may run commands as one."""


def local_container(context: Path | None = None, **spec: object) -> LocalContainer:
    return LocalContainerFactory()(ContainerSpec(name="test", context_dir=context, **spec))  # type: ignore[arg-type]


NAMESPACES = ("unshare", *(() if is_privileged() else ("--map-root-user",)))
"""An `unshare` that can make any namespace."""
STEADY_MOUNTS = (*NAMESPACES, "--mount")
"""Before a bubblewrap that binds all mounts of the host: it fails when one of them goes meanwhile, as engines' do."""


def as_ordinary_user(*arguments: str, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """Runs this Python as an ordinary user: this one, or `nobody` if this one is root.

    Paths that our permissions hide from `nobody` are bound for him.
    """
    if os.geteuid() != 0:
        return _python([], *arguments, timeout=timeout)
    shown = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = {parent for path in shown for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    # Only the outermost: what lies below it is empty in the new one.
    outer = sorted(path for path in closed if not any(parent in closed for parent in path.parents))
    words = [word for path in outer for word in ("--perms", "0755", "--tmpfs", str(path))]
    parents = [parent for path in shown for parent in reversed(path.parents) if closed.intersection(parent.parents)]
    words += [word for path in parents for word in ("--perms", "0755", "--dir", str(path))]
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    before = [*STEADY_MOUNTS, str(find_bwrap()), "--dev-bind", "/", "/", *words, "--", *user]
    return _python(before, *arguments, timeout=timeout)


def _python(before: Sequence[str], *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-B", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
