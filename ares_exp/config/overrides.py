"""Functions for the overrides on a command line (`env.path=tasks`): their keys, parsing, and quoting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


_HOME = re.compile(r"(?:(?<=^)|(?<=[\[,]))~(/[^,\]\s]*|)(?=[,\]]|$)")


def dotted_items(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of every leaf of a nested mapping, including lists and empty mappings."""
    if isinstance(config, Mapping) and config:
        for key, item in config.items():
            yield from dotted_items(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of every scalar in a nested config. Items of a list have the list's key."""
    if isinstance(config, list):
        for item in config:
            yield from leaves(item, prefix)
    elif isinstance(config, Mapping):
        for key, item in config.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config


def flags_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the flags of a command line from the overrides. Hydra's parser requires all flags first."""
    overrides = [one for one in arguments if one.startswith("~") or ("=" in one and not one.startswith("-"))]
    return [one for one in arguments if one not in overrides], overrides


def with_home(arguments: Iterable[str]) -> list[str]:
    """Expands `~` to the home folder in values and in lists of values (`env.path=~/tasks`).

    A shell does not expand `~` after a `=`, and Hydra's grammar does not support it. Values with quotes are unchanged.
    """
    return [_with_home(one) for one in arguments]


def _with_home(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if "~" not in value or "'" in value or '"' in value:
        return argument
    if argument.startswith("-"):
        return f"{key}={Path(value).expanduser()}"
    return f"{key}{equals}{_HOME.sub(lambda found: quoted(f'{Path.home()}{found[1]}'), value)}"


def parse_overrides(lines: Iterable[str]) -> list[Override]:
    """Parses overrides with Hydra's grammar. Raises Hydra's `OverrideParseException` for an invalid override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(overrides=list(lines))


def key_set_by(override: Override) -> str:
    """Returns the key that an override sets. For `policy@env.oracle=…`, this is `env.oracle`."""
    package = override.package
    return override.key_or_group if not package or package.startswith("_") else str(package)


def covers(key: str, other: str) -> bool:
    """Returns whether the key `other` is `key` itself or a key below it, such as `env.path` below `env`."""
    return other == key or other.startswith((f"{key}.", f"{key}/"))


def value_of(text: str) -> Any:
    """Parses the text after the `=` of an override as YAML. Returns it unchanged if it is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def quoted(text: str) -> str:
    """Quotes a string for an override, and escapes `${` so that Hydra does not interpolate it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text.replace("${", "\\${"), quote=Quote.double).with_quotes()


def listed(texts: Iterable[str]) -> str:
    """Formats strings as a list for an override."""
    return f"[{','.join(map(quoted, texts))}]"
