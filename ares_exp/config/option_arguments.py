"""Arguments of an option: their keys, defaults and meanings.

An option is its file laid over the defaults of its constructor. What an argument means is the comment behind it in the
file, else what the constructor's docstring says of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ares_exp.config.added_arguments import ADDED_ARGUMENTS
from ares_exp.config.options import ROOT_CONFIG, Option, conf_dir

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
_IN_YAML = {"`None`": "`null`", "`True`": "`true`", "`False`": "`false`"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an option.

    Attributes:
        key: Where it is set.
        default: Its default, as YAML.
        prose: What it means.
    """

    key: str
    default: str
    prose: str


def arguments_of(option: Option) -> list[Argument]:
    """Reads the arguments of an option; a preset (`experiment`) has none of its own.

    Raises:
        OSError: Its file cannot be read.
        yaml.YAMLError: It is no YAML.
    """
    package = re.search(r"^# @package (\S+)", option.path.read_text(encoding="utf-8"), re.MULTILINE)
    if package and package[1] == "_global_":
        return []
    return _arguments_of(option.group, package[1] if package else option.group, *_settings(option.path))


def arguments_of_node(name: str) -> list[Argument]:
    """Reads the arguments of a node of the root config that names a class."""
    settings, comments = _settings(conf_dir() / f"{ROOT_CONFIG}.yaml")
    own = {key.removeprefix(f"{name}."): said for key, said in comments.items() if key.startswith(f"{name}.")}
    return _arguments_of(name, name, settings[name], own)


def _arguments_of(group: str, prefix: str, settings: Mapping[str, Any], comments: Mapping[str, str]) -> list[Argument]:
    from ares_exp.config.option_files import option_defaults

    target = settings.get("_target_")
    own = {name: value for name, value in settings.items() if not name.startswith("_")}
    if not isinstance(target, str):
        return list(_arguments(own, prefix, comments, {}))
    added = {name: argument.prose for name, argument in ADDED_ARGUMENTS.get(group, {}).items()}
    defaults = {**option_defaults(group, target, is_partial=bool(settings.get("_partial_"))), **own}
    return list(_arguments(defaults, prefix, comments, {**added, **_documented(target)}))


def _arguments(
    settings: Mapping[str, Any], prefix: str, comments: Mapping[str, str], prose: Mapping[str, str], path: str = ""
) -> Iterator[Argument]:
    for name, value in settings.items():
        here = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from _arguments(value, prefix, comments, prose, f"{here}.")
        else:
            top = here.partition(".")[0]
            said = comments.get(here) or prose.get(here) or comments.get(top) or prose.get(top, "")
            yield Argument(f"{prefix}.{here}", as_yaml(value), said)


def _settings(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads the values in a file and in the files that it overlays, and their comments, by dotted name."""
    import yaml

    text = path.read_text(encoding="utf-8")
    own = yaml.safe_load(text) or {}
    settings: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for entry in own.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and (path.parent / f"{entry}.yaml").exists():
            more, said = _settings(path.parent / f"{entry}.yaml")
            settings |= more
            comments |= said
    for name, value in own.items():
        before = settings.get(name)
        settings[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return settings, comments | _comments(text)


def _comments(text: str) -> dict[str, str]:
    """Reads the comment behind each `name: value`, by dotted name."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"^( *)(\w+):(?: (?:[^#]|(?<! )#)*?)?(?:\s+# (.*))?$", line)
        if match is None:
            continue
        indent = len(match[1])
        path = [*(item for item in path if item[0] < indent), (indent, match[2])]
        if match[3]:
            found[".".join(name for _, name in path)] = match[3]
    return found


def _documented(target: str) -> dict[str, str]:
    """Reads the descriptions of arguments in the docstrings of a class or function."""
    try:
        made: Any = resolve_name(target)
    except Exception:  # the import of anybody's module may raise anything
        return {}
    kinds = reversed(made.__mro__) if inspect.isclass(made) else ()
    objects = [one for kind in kinds for one in (kind, vars(kind).get("__init__"))] or [made]
    found: dict[str, str] = {}
    for section in (text for one in objects for text in _SECTION.findall(inspect.getdoc(one) or "")):
        for entry in re.split(r"\n(?= {4}\S)", section.rstrip()):
            names, _, said = entry.strip().partition(":")
            for python, yaml in _IN_YAML.items():
                said = said.replace(python, yaml)
            found |= {name.strip(" *"): " ".join(said.split()) for name in names.split(",")}
    return found


def as_yaml(value: Any) -> str:
    """Writes a default as YAML, in one line."""
    import yaml

    if isinstance(value, str):
        return value or '""'
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).replace("\n...\n", "").strip()
