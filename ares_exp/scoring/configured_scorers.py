"""The scorers of a composed config, made of `env.scorers` and `env.verifier_weight`."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.config.added_arguments import SCORER, added_defaults
from ares_exp.config.instantiate import instantiate_node
from ares_exp.config.targets import import_target
from ares_exp.errors import ConfigError
from ares_exp.scoring.call import ConfiguredScorer
from ares_exp.scoring.scores import REWARD
from ares_exp.scoring.scoring_environment import ScoringRules

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

    nodes = dict(_named_nodes(OmegaConf.select(config, _KEY)))
    if not nodes:
        return ScoringRules()
    defaults = added_defaults(SCORER)
    scorers = []
    for name, node in nodes.items():
        own = {key: value for key, value in node.items() if key not in defaults}
        apart = config.copy()
        with open_dict(apart):
            OmegaConf.update(apart, _KEY, {name: _as_made(own)}, merge=False)
        part = instantiate_node(apart, f"{_KEY}.{name}")
        _check_call(f"{_KEY}.{name}", part)
        weight, timeout = (_number(f"{_KEY}.{name}.{key}", node.get(key, defaults[key])) for key in defaults)
        if timeout <= 0:
            raise ConfigError(f"Expected `{_KEY}.{name}.timeout_sec` to be a number above 0, got {timeout:g}.")
        scorer = ConfiguredScorer(name, part, weight, timeout)
        scorer.scorer.set_name(name)
        scorers.append(scorer)
    return ScoringRules(tuple(scorers), _number(_WEIGHT, OmegaConf.select(config, _WEIGHT, default=1.0)))


def _named_nodes(scorers: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the nodes by name: those of a mapping, or of a list, where a function names itself."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(scorers, resolve=False) if OmegaConf.is_config(scorers) else scorers
    if plain is None:
        return
    if isinstance(plain, list):
        entries: list[tuple[str | None, Any]] = [(None, entry) for entry in plain]
    elif isinstance(plain, dict):
        entries = [(str(name), entry) for name, entry in plain.items() if entry is not None]
    else:
        raise ConfigError(f"Expected `{_KEY}` to be a list or a mapping of scorers, got {plain!r:.100}. Set {_FORMS}.")
    names = set[str]()
    for given, entry in entries:
        node = {"_target_": entry} if isinstance(entry, str) else entry
        if not isinstance(node, dict) or not isinstance(target := node.get("_target_"), str):
            where = _KEY if given is None else f"{_KEY}.{given}"
            raise ConfigError(f"Expected `{where}` to name a function or a class, got {entry!r:.100}. Set {_FORMS}.")
        target = target.replace(":", ".")
        name = given if given is not None else str(node.get("name", target.rpartition(".")[2]))
        if not _NAME.fullmatch(name) or name == REWARD or name in names:
            raise ConfigError(
                f"Expected each of `{_KEY}` to have a name of its own, of letters, digits, '_' and '-', and not "
                f"`{REWARD}`, which is the verifier's, got {name!r}. Name them: {_FORMS}."
            )
        names.add(name)
        yield (
            name,
            {**{key: one for key, one in node.items() if given is not None or key != "name"}, "_target_": target},
        )


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
