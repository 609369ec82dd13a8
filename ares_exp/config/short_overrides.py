"""`tracker.project=x` for `tracker.wandb.project=x`.

The options of some groups have their own node below the group, so that several can be chosen at once. If one
is chosen, its name may be left out of an override.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from ares_exp.config.options import ROOT_CONFIG
from ares_exp.config.overrides import parse_overrides

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SEVERAL = ("collector", "tracker")
"""Groups in which several options can be chosen."""


def in_full(overrides: Sequence[str], root_config: str = ROOT_CONFIG) -> list[str]:
    """Puts in the name of an option where it was left out.

    An argument that is no override, or does not compose, stays unchanged: the next reader reports the error.

    Args:
        overrides: As they were typed.
        root_config: Name of the config that they change.
    """
    from hydra.errors import OverrideParseException

    if not any(one.lstrip("+~").startswith(tuple(f"{group}." for group in SEVERAL)) for one in overrides):
        return list(overrides)
    try:
        parsed = parse_overrides(overrides)
    except OverrideParseException:
        return list(overrides)
    chosen = _chosen(parsed, root_config)
    return [_in_full(one, chosen) for one in parsed]


def _in_full(override: Override, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    line = str(override.input_line)
    group, _, rest = override.key_or_group.partition(".")
    for option, node in chosen.get(group, {}).items():
        if rest.partition(".")[0] in node:
            return line.replace(f"{group}.", f"{group}.{option}.", 1)
    return line


def _chosen(overrides: Sequence[Override], root_config: str) -> dict[str, Mapping[str, Any]]:
    """Returns, by group, name and node of the one chosen option, if it has its own node."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from ares_exp.config.options import conf_dir

    choices = [
        str(one.input_line)
        for one in overrides
        if one.key_or_group in (*SEVERAL, "experiment", "hydra.searchpath") and not one.is_sweep_override()
    ]
    chosen = {}
    with suppress(HydraException), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(root_config, overrides=choices)
        for group in SEVERAL:
            node = config[group]
            if OmegaConf.is_dict(node) and "_target_" not in node and len(node) == 1:
                chosen[group] = cast("Mapping[str, Any]", node)
    return chosen
