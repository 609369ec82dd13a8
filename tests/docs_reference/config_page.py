"""docs/reference/config.md: every top-level key, and every argument of every option of every group."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ares_exp.config.option_arguments import arguments_of, as_yaml
from ares_exp.config.options import Option, find_options
from ares_exp.config.plugins import OPTION_GROUPS
from ares_exp.config.schema import keys
from tests.docs_reference.markdown import GENERATED, plain, table


def config_page() -> str:
    """The page."""
    parts = [
        GENERATED,
        "# Config reference\n\n"
        "Every key with its default and meaning, and every option of every group with its arguments. "
        "`python -m ares_exp --help` lists the same (with `GROUP=OPTION`, the arguments of an option), `--cfg job` "
        "prints what is in force.\n\n## Top-level keys\n\n",
        "`null` means no limit unless the key says otherwise.\n\n",
        table(
            ("key", "default", "meaning"),
            (
                (f"`{item.name}`", f"`{as_yaml(item.default)}`", plain(item.metadata["prose"] + _range(item.metadata)))
                for item in keys()
            ),
        ),
    ]
    for group in OPTION_GROUPS:
        parts.append(f"\n## Group `{group}`\n")
        parts += [_section(option) for option in find_options(group)]
    return "".join(parts)


def _range(metadata: Mapping[str, Any]) -> str:
    if metadata["choices"]:
        return f" ({' | '.join(metadata['choices'])})"
    if metadata["least"] is not None:
        return f" (at least {metadata['least']:g})"
    return "" if metadata["above"] is None else f" (above {metadata['above']:g})"


def _section(option: Option) -> str:
    text = f"\n### {option.group}={option.name}\n\n{plain(option.description)}\n"
    rows = [(f"`{item.key}`", f"`{item.default}`", plain(item.prose)) for item in arguments_of(option)]
    return text + (f"\n{table(('key', 'default', 'meaning'), rows)}" if rows else "")


def chosen_options() -> set[tuple[str, str]]:
    """Every option as (group, name)."""
    return {(group, option.name) for group in OPTION_GROUPS for option in find_options(group)}


def known_keys(key: str) -> bool:
    """Whether a dotted key such as `env.limit` is one of some option of its group, or below or above one."""
    return any(key == known or f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.") for known in _all())


@functools.cache
def _all() -> frozenset[str]:
    found = set()
    for group in OPTION_GROUPS:
        for option in find_options(group):
            for item in arguments_of(option):
                found.add(item.key)
                found.add(item.key.replace(f"{group}.{option.name}.", f"{group}.", 1))  # short, where one is chosen
    return frozenset(found)
