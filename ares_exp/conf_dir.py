"""Where the config tree is: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The folder that holds `config.yaml`.

    Raises:
        FileNotFoundError: The installation is broken.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"Expected the config tree in {package / 'conf'}: the installation of ares_exp is broken.")
