"""`tracker.project=x` for `tracker.wandb.project=x`.

The options of some groups have a node of their own below the group, so that several can be chosen at once. Where one
is chosen, its name may be left out of an override.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SEVERAL = ("collector", "tracker")
"""The groups of which several options can be chosen."""


def in_full(overrides: Sequence[str]) -> list[str]:
    """The overrides, with the name of an option put in where it was left out.

    What is no override, or does not compose, stays as it is: whoever reads it next says what is wrong with it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    if not any(one.lstrip("+~").startswith(tuple(f"{group}." for group in SEVERAL)) for one in overrides):
        return list(overrides)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides=list(overrides))
    except OverrideParseException:
        return list(overrides)
    chosen = _chosen(parsed)
    return [_in_full(one, chosen) for one in parsed]


def _in_full(override: Override, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    line = str(override.input_line)
    group, _, rest = override.key_or_group.partition(".")
    for option, node in chosen.get(group, {}).items():
        if rest.partition(".")[0] in node:
            return line.replace(f"{group}.", f"{group}.{option}.", 1)
    return line


def _chosen(overrides: Sequence[Override]) -> dict[str, Mapping[str, Any]]:
    """By group, the name and node of the one option that is chosen, if it has a node of its own."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from ares_exp.conf_dir import conf_dir

    choices = [
        str(one.input_line)
        for one in overrides
        if one.key_or_group in (*SEVERAL, "experiment", "hydra.searchpath") and not one.is_sweep_override()
    ]
    chosen = {}
    with suppress(HydraException), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=choices)
        for group in SEVERAL:
            node = config[group]
            if OmegaConf.is_dict(node) and "_target_" not in node and len(node) == 1:
                chosen[group] = cast("Mapping[str, Any]", node)
    return chosen
