"""Packages that are installed: in a venv, or as far as this process can tell (files and metadata in its path)."""

import os
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


class Site:
    """A folder where Python looks for packages, in front of all others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def install(self, distribution: str, plugins: Mapping[str, str], files: Mapping[str, str] | None = None) -> None:
        """Puts a package there.

        Args:
            distribution: Its name; its version is 1.0.
            plugins: Its entry points in the group `ares_exp.plugins`.
            files: What its files hold, by their paths.
        """
        metadata = self._folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        points = "".join(f"{name} = {value}\n" for name, value in plugins.items())
        written = {
            metadata / "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
            metadata / "entry_points.txt": f"[ares_exp.plugins]\n{points}",
            **{self._folder / path: text for path, text in (files or {}).items()},
        }
        packages = {Path(path).parts[0] for path in files or ()}
        for name in [one for one in sys.modules if one.partition(".")[0] in packages]:
            self._monkeypatch.delitem(sys.modules, name)  # another test has installed one of that name
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._monkeypatch.syspath_prepend(str(self._folder))

    def search(self, folder: Path) -> None:
        """Has Python look for packages in another folder, too."""
        self._monkeypatch.syspath_prepend(str(folder))


def python_with(package: Path, folder: Path) -> Path:
    """The interpreter of a venv in `folder`, with the packages that are installed here, and one from its wheel."""
    venv.create(folder / "venv", with_pip=False)
    purelib = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    here = [*site.getsitepackages(), *map(os.path.abspath, paths)]
    (purelib / "here.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in here))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=package, check=True, timeout=100, capture_output=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(purelib)
    return folder / "venv" / "bin" / "python"
