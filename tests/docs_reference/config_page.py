"""docs/reference/config.md: every top-level key, and every argument of every option of every group."""

import functools
from collections.abc import Sequence

from ares_exp.config.options import OPTION_GROUPS, Option, find_options
from ares_exp.config.schema import MADE_NODES, Key, keys
from ares_exp.config.targets import Argument, arguments_of, arguments_of_node, as_yaml
from tests.docs_reference.markdown import GENERATED, plain, table


def config_page() -> str:
    parts = [
        GENERATED,
        "# Config reference\n\n"
        "Every key with its default and meaning, and every option of every group with its arguments. "
        "`python -m ares_exp --help` also lists them. `--help GROUP=OPTION` lists the arguments of an option, and "
        "`--cfg job` prints the composed config.\n\n## Top-level keys\n\n"
        "`null` means no limit, unless the description defines another meaning.\n\n",
        table(
            ("key", "default", "meaning"),
            ((f"`{item.name}`", f"`{as_yaml(item.default)}`", plain(item.prose + _range(item))) for item in keys()),
        ),
    ]
    for node in MADE_NODES:
        parts += [f"\n## `{node}`\n\n", _table(arguments_of_node(node))]
    for group in OPTION_GROUPS:
        parts.append(f"\n## Group `{group}`\n")
        parts += [_section(option) for option in find_options(group)]
    return "".join(parts)


def _range(key: Key) -> str:
    if key.least is not None:
        return f" (at least {key.least:g})"
    return "" if key.above is None else f" (above {key.above:g})"


def _section(option: Option) -> str:
    text = f"\n### {option.group}={option.name}\n\n{plain(option.description)}\n"
    arguments = arguments_of(option)
    return text + (f"\n{_table(arguments)}" if arguments else "")


def _table(arguments: Sequence[Argument]) -> str:
    rows = [(f"`{item.key}`", f"`{item.default}`", plain(item.prose)) for item in arguments]
    return table(("key", "default", "meaning"), rows)


def chosen_options() -> set[tuple[str, str]]:
    return {(group, option.name) for group in OPTION_GROUPS for option in find_options(group)}


def known_keys(key: str) -> bool:
    """Whether a dotted key such as `env.limit` is one of some option of its group, or below or above one."""
    return any(key == known or f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.") for known in _all())


@functools.cache
def _all() -> frozenset[str]:
    found = set()
    for group in OPTION_GROUPS:
        for option in find_options(group):
            found.update(item.key for item in arguments_of(option))
    for node in MADE_NODES:
        found.update(item.key for item in arguments_of_node(node))
    return frozenset(found)
