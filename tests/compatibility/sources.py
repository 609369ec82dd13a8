"""Makes the folders, the registry.json and the git repository of a `Selection`."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.compatibility.case import Selection, write_task


def make_sources(case: Selection, cwd: Path) -> dict[str, Any]:
    """Creates the sources in the current directory or a repository next to it; returns the options of the case."""
    folder = cwd.parent / "repository" if case.repository else cwd
    for name in case.folders:
        write_task(folder / name, {"task.toml": "["} if name in case.broken else {})
    meant = {"{repo}": f"file://{folder}", "{commit}": _committed(folder) if case.repository else ""}
    if case.registry is not None:
        (folder / "registry.json").write_text(_filled(json.dumps(case.registry), meant), encoding="utf-8")
        if case.repository:
            _committed(folder)
    return {name: _filled(value, meant) if isinstance(value, str) else value for name, value in case.options.items()}


def mirror(*addresses: str) -> dict[str, str]:
    """Environment variables by which git reads another repository for each of these: address, mirror, address, …"""
    pairs = list(zip(addresses[::2], addresses[1::2], strict=True))
    settings = {"GIT_CONFIG_COUNT": str(len(pairs))}
    for number, (address, instead) in enumerate(pairs):
        settings |= {f"GIT_CONFIG_KEY_{number}": f"url.{instead}.insteadOf", f"GIT_CONFIG_VALUE_{number}": address}
    return settings


def _filled(text: str, meant: dict[str, str]) -> str:
    for name, value in meant.items():
        text = text.replace(name, value)
    return text


def _committed(folder: Path) -> str:
    """The commit of all that is in the folder."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "uploadpack.allowFilter", "true")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=a commit")
    return git(folder, "rev-parse", "HEAD")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=30)
    return done.stdout.decode().strip()
