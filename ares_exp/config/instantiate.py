"""Parts of a run, made from the nodes of a config: what is wrong with an argument is said with its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.config.targets import added_defaults, explain_target, parameters_of
from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.secrets import scrub

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MADE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "env": ("an environment source", ("path", "load", "check", "make")),
    "agent": ("a factory of code agents", ("__call__",)),
    "container": ("a container factory", ("__call__", "check")),
    "wrapper": ("a wrapper of environments", ("__call__",)),
    "collector": ("a trajectory collector", ("begin_episode", "record_step", "end_episode")),
    "tracker": ("a tracker", ("start", "log_episode", "finish")),
    "snapshot": ("a snapshot schedule", ("output_dir", "is_only_to_continue", "around", "collect_garbage")),
    "executor": ("an executor", ("checks", "open", "room")),
    "trainer": ("a trainer", ("check", "train")),
}
"""What the options of a group make, and what that has at least."""

_OF_AN_AGENT = {"container", "llm_client"}
"""What agents are made with, each episode its own; a class that takes it is no factory of agents."""


def instantiate_several(config: DictConfig, group: str) -> dict[str, Any]:
    """Makes the components of a group of which several can be chosen (`group=[a,b]`), by name.

    Raises:
        ConfigError: As `instantiate_group`.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, group)
    if not node or not OmegaConf.is_dict(node) or "_target_" in node:
        return {group: instantiate_group(config, group)}
    return {str(name): _checked(group, instantiate_node(config, f"{group}.{name}")) for name in node}


def instantiate_group(config: DictConfig, group: str) -> Any:
    """Makes the component that a group's node describes.

    Args:
        config: The composed config.
        group: Name of the group.

    Raises:
        ConfigError: An argument is unknown, missing or has a wrong value, or something else is made.
    """
    return _checked(group, instantiate_node(_without_added(config, group), group))


def _without_added(config: DictConfig, group: str) -> DictConfig:
    """Returns the config without the arguments of a group's option that its class does not take."""
    from omegaconf import OmegaConf, open_dict

    node = OmegaConf.select(config, group)
    added = [name for name in added_defaults(group) if OmegaConf.is_dict(node) and name in node]
    if not added:
        return config
    config = config.copy()
    with open_dict(config[group]):
        for name in added:
            config[group].pop(name)
    return config


def _checked(group: str, made: Any) -> Any:
    """What was made, if it has what is asked of its group."""
    what, members = _MADE.get(group, ("", ()))
    if lacking := [name for name in members if not hasattr(made, name)]:
        raise ConfigError(
            f"Expected the option of `{group}` to make {what}, got {type(made).__name__}, which has no "
            f"{', '.join(f'`{name}`' for name in lacking)}. `_target_` names its class."
        )
    return made


def instantiate_node(config: DictConfig, group: str) -> Any:
    """Makes what a node describes: that of a group, or `group.name` for one of its components.

    Raises:
        ConfigError: An argument is unknown, missing or has a wrong value.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    node = OmegaConf.select(config, group)
    if not node:
        raise ConfigError(f"No option is chosen for `{group}`: set `{group}=…`; `--help` lists them.")
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        raise ConfigError(f"The option chosen for `{group}` has no `_target_`: name the class that it makes.")
    _refuse_agent_as_factory(group, node)
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        for name in node:
            part = OmegaConf.select(config, f"{group}.{name}")
            if OmegaConf.is_dict(part) and "_target_" in part:
                instantiate_node(config, f"{group}.{name}")  # raises, if that is what is wrong
        cause = error.__cause__ or error
        if isinstance(cause, ImportError | AttributeError) and (why := explain_target(str(node["_target_"]))):
            raise ConfigError(f"`{group}` cannot be made: {why}") from error
        unknown = None if isinstance(cause, ImportError) else _unknown_argument(group, node)
        raise ConfigError(unknown or _explain(group, cause)) from error
    except MissingMandatoryValue as error:
        key = str(error.full_key or group)
        raise ConfigError(f"`{key}` is needed and has no default: set `{key}=…`.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"`{group}`: {str(error).splitlines()[0]}") from None


def _refuse_agent_as_factory(group: str, node: DictConfig) -> None:
    """Refuses the class of an agent, which each episode makes of its own, where a factory of agents is expected."""
    keys = {str(key) for key in node}  # `in` of a node raises inside, in a cycle that keeps the caller's frames alive
    if group == "agent" and "_partial_" not in keys and keys >= _OF_AN_AGENT:
        raise ConfigError(
            f"Expected the option of `agent` to make a factory of agents, got {node['_target_']}, which is an agent "
            "itself: it takes the `container` and the `llm_client` of an episode. Add the line `_partial_: true` to "
            "the option's file, which makes a factory of the class."
        )


def _unknown_argument(group: str, node: DictConfig) -> str | None:
    """What to say of an argument that the component does not take; `None` when it takes them all."""
    if (parameters := parameters_of(str(node["_target_"]))) is None:
        return None
    takes = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    unknown = [str(key) for key in node if not str(key).startswith("_") and key not in takes]
    if not unknown or len(takes) < len(parameters):
        return None
    if "_target_" in (node[unknown[0]] if isinstance(node[unknown[0]], Mapping) else ()):
        return (
            f"`{group}` is one component and `{unknown[0]}` another: to choose both, start the file of the first with "
            f"`# @package {group}.NAME`."
        )
    known = f"it takes {', '.join(f'`{name}`' for name in takes)}" if takes else "it takes none"
    return f"`{group}` has no argument `{unknown[0]}`: {known}.{close_matches(unknown[0], takes)}"


def _explain(group: str, cause: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(cause, ConfigError):
        return str(cause)
    if not isinstance(cause, ValidationError):
        return f"`{group}` cannot be made: {' '.join(str(cause).split())}"
    problems = []
    for item in cause.errors(include_url=False):
        key = ".".join([group, *map(str, item["loc"])])
        shown = scrub({key: item["input"]})[key]
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"`{key}`: {message}" + ("" if "got " in message else f" (got {shown!r:.80})"))
    return f"{'; '.join(problems)}. `ares-exp --cfg job -p {group}` shows what is in force."
