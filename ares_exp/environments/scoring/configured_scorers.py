"""The scorers of a composed config, made of `scorer`, `env.scorers` and `env.verifier_weight`."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.config.targets import SCORER, added_defaults, import_target, instantiate_node
from ares_exp.environments.scoring.scorer_call import ConfiguredScorer
from ares_exp.environments.scoring.scores import REWARD
from ares_exp.environments.scoring.scoring_environment import ScoringRules
from ares_exp.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KEY = "env.scorers"
_WEIGHT = "env.verifier_weight"
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_FORMS = "`env.scorers=[package.module.function]`, or by name `env.scorers={tidy: {_target_: package.module.function}}`"


def make_scoring_rules(config: DictConfig) -> ScoringRules:
    """Makes the scorers that a config names, and their weights.

    Raises:
        ConfigError: One cannot be made, or a weight is no number.
    """
    from omegaconf import OmegaConf, open_dict

    defaults = added_defaults(SCORER)
    scorers: dict[str, ConfiguredScorer] = {}
    for key, given, node in _nodes(config):
        name = str(node.get("name") or given)
        if not _NAME.fullmatch(name) or name == REWARD or name in scorers:
            raise ConfigError(
                "Expected each scorer to have a name of its own, of letters, digits, '_' and '-', and not "
                f"`{REWARD}`, which is the verifier's, got {name!r}. Name them: {_FORMS}."
            )
        apart = config.copy()
        with open_dict(apart):
            OmegaConf.update(apart, _KEY, None, merge=False)
            own = {argument: value for argument, value in node.items() if argument not in defaults}
            OmegaConf.update(apart, key, _as_made(own), merge=False, force_add=True)
        part = instantiate_node(apart, key)
        _check_call(key, part)
        weight, timeout = (_number(f"{key}.{one}", node.get(one, defaults[one])) for one in ("weight", "timeout_sec"))
        if timeout <= 0:
            raise ConfigError(f"Expected `{key}.timeout_sec` to be a number above 0, got {timeout:g}.")
        scorers[name] = ConfiguredScorer(name, part, weight, timeout)
        scorers[name].scorer.set_name(name, key)
    if not scorers:
        return ScoringRules()
    return ScoringRules(tuple(scorers.values()), _number(_WEIGHT, OmegaConf.select(config, _WEIGHT, default=1.0)))


def _nodes(config: DictConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields key, default name and content of each scorer's node: that of `scorer`, then those of `env.scorers`."""
    from omegaconf import OmegaConf

    def plain(key: str) -> Any:
        found = OmegaConf.select(config, key)
        return OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found

    several = plain(_KEY) or {}
    if not isinstance(several, list | dict):
        raise ConfigError(
            f"Expected `{_KEY}` to be a list or a mapping of scorers, got {several!r:.100}. Set {_FORMS}."
        )
    entries = [(SCORER, plain(SCORER) or None)]
    if isinstance(several, list):
        entries += [(_KEY, entry) for entry in several]
    else:
        entries += [(f"{_KEY}.{name}", entry) for name, entry in several.items()]
    for key, entry in entries:
        if entry is None:
            continue
        node = {"_target_": entry} if isinstance(entry, str) else entry
        if not isinstance(node, dict) or not isinstance(target := node.get("_target_"), str):
            raise ConfigError(f"Expected `{key}` to name a function or a class, got {entry!r:.100}. Set {_FORMS}.")
        target = target.replace(":", ".")
        named = target.rpartition(".")[2].lower() if key in (SCORER, _KEY) else key.rpartition(".")[2]
        yield key if key != _KEY else f"{_KEY}.{node.get('name') or named}", named, {**node, "_target_": target}


def _as_made(node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the node of a function with `_partial_`: it is the scorer, and not called to make one."""
    made = import_target(node["_target_"])
    is_made = inspect.isclass(made) or "_partial_" in node
    return dict(node) if is_made else {**node, "_partial_": True}


def _check_call(key: str, part: Any) -> None:
    """Refuses what cannot be called with an episode and its container."""
    if not callable(part):
        raise ConfigError(f"Expected `{key}` to make a scorer, got {type(part).__name__}, which cannot be called.")
    called, options = (part.func, part.keywords) if isinstance(part, functools.partial) else (part, {})
    try:
        signature = inspect.signature(called)
    except ValueError:  # a builtin that does not tell
        return
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"Expected `{key}` to be callable with an episode and its container, and options by name: {error}."
        ) from None


def _number(key: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise ConfigError(f"Expected `{key}` to be a finite number, got {value!r:.100}. Set `{key}=1`.")
    return float(number)
