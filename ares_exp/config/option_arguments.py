"""The arguments of an option: their keys, defaults and descriptions.

Values in the option's file override the defaults of the constructor. The description of an argument is the comment on
its line in the file. If there is no comment, the description is the entry in the constructor's docstring.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.config.options import ROOT_CONFIG, Option, conf_dir
from ares_exp.config.targets import ADDED_ARGUMENTS, documented, option_defaults


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an option: the dotted key, the default as YAML, and the description, which may be empty."""

    key: str
    default: str
    prose: str


def arguments_of(option: Option) -> list[Argument]:
    """Returns the arguments of an option. An experiment has none, because it sets top-level keys instead.

    Raises `OSError` or `yaml.YAMLError` if the option's file cannot be read.
    """
    package = re.search(r"^# @package (\S+)", option.path.read_text(encoding="utf-8"), re.MULTILINE)
    if package and package[1] == "_global_":
        return []
    return _arguments_of(option.group, package[1] if package else option.group, *_settings(option.path))


def arguments_of_node(name: str) -> list[Argument]:
    """Reads the arguments of a root config node that has a `_target_`, such as `budget`."""
    settings, comments = _settings(conf_dir() / f"{ROOT_CONFIG}.yaml")
    own = {key.removeprefix(f"{name}."): said for key, said in comments.items() if key.startswith(f"{name}.")}
    return _arguments_of(name, name, settings[name], own)


def _arguments_of(group: str, prefix: str, settings: Mapping[str, Any], comments: Mapping[str, str]) -> list[Argument]:
    target = settings.get("_target_")
    own = {name: value for name, value in settings.items() if not name.startswith("_")}
    if not isinstance(target, str):
        return list(_arguments(own, prefix, comments, {}))
    added = {name: prose for name, (_, prose) in ADDED_ARGUMENTS.get(group, {}).items()}
    defaults = {**option_defaults(group, target, is_partial=bool(settings.get("_partial_"))), **own}
    return list(_arguments(defaults, prefix, comments, {**added, **documented(target)}))


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
    """Reads a file and the files in its defaults list. Returns the file's content, and its comments by dotted key."""
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
    """Reads the comment on the line of each `name: value`. The keys of the result are dotted names."""
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


def as_yaml(value: Any) -> str:
    """Formats a default value as one line of YAML."""
    import yaml

    if isinstance(value, str):
        return value or '""'
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).replace("\n...\n", "").strip()
