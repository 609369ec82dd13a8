"""A sandbox whose root is a copy of this machine's, for tests of `container=host`: real paths stay as they are."""

import os
import subprocess
import sys
from pathlib import Path

from ares_exp.containers.local.isolation import find_bwrap

ROOT = Path(__file__).parents[3]
_SIGN = Path("/ares_exp-sandbox")
_EMPTY = ("/tmp", "/root")


def is_sandbox() -> bool:
    return _SIGN.is_dir()


def _is_hidden(path: Path) -> bool:
    """Returns whether the sandbox lacks a path: it is in an empty directory or on another file system than the root."""
    return any(path.is_relative_to(empty) for empty in _EMPTY) or path.stat().st_dev != Path("/").stat().st_dev


def run_in_sandbox(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Runs this Python as root in a new sandbox, with separate processes and a writable root directory."""
    words = ["--overlay-src", "/", "--tmp-overlay", "/", "--dev", "/dev", "--proc", "/proc"]
    words += [word for path in _EMPTY for word in ("--tmpfs", path)]
    words += ["--dir", str(_SIGN)]
    shown = dict.fromkeys(filter(_is_hidden, (Path(sys.base_prefix), Path(sys.prefix), ROOT)))
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    sandbox = ("unshare", "--mount", find_bwrap(), "--unshare-pid", "--die-with-parent")
    return subprocess.run(
        [*sandbox, *words, "--", sys.executable, "-B", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
