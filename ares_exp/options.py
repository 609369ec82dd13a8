"""Which options there are in a group, and where they come from: ares_exp itself, a plugin, a folder of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.conf_dir import conf_dir
from ares_exp.plugins import installed_plugins

BUILT_IN = "built in"
MAX_COMMENT_CHARS = 65536


@dataclass(frozen=True, slots=True)
class Option:
    """One choice in a group: `group=name`.

    Attributes:
        group: The group.
        name: The choice.
        path: Its file.
        origin: `built in`, `plugin NAME`, or the folder of a `--config-dir`.
        description: The first line of the file.
    """

    group: str
    name: str
    path: Path
    origin: str
    description: str


def find_options(group: str, config_dirs: Sequence[Path] = ()) -> list[Option]:
    """The options of a group, those of ares_exp first. Of two with the same name the one that Hydra takes is listed.

    Args:
        group: The group.
        config_dirs: Folders of the user's own.
    """
    plugins = installed_plugins().plugins
    places = [(conf_dir(), BUILT_IN), *((plugin.folder, f"plugin {plugin.name}") for plugin in plugins)]
    places += [(folder, str(folder)) for folder in config_dirs]
    found: dict[str, Option] = {}
    for folder, origin in places:
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem not in found:
                found[path.stem] = Option(group, path.stem, path, origin, _first_comment(path))
    return list(found.values())


def _first_comment(path: Path) -> str:
    """The description that a file opens with; empty for one that has none or cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(MAX_COMMENT_CHARS).splitlines()
    except OSError:
        return ""
    return next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @package")), "")
