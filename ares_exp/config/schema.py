"""The schema of the root config: type, default, range and description of each top-level key.

The groups (`env`, `policy`, …) and the nodes `budget` and `retry` have a `_target_`, which names a class. The
constructor of this class validates their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.results import Outcome

GROUPS = (
    *("env", "agent", "container", "policy", "wrapper", "collector", "tracker", "snapshot", "executor"),
    "scorer",
)
"""Groups of options. The chosen option of a group becomes the config node with the name of the group."""
MADE_NODES = ("budget", "retry")
"""Nodes with a `_target_` that are not groups, because their class is always the same."""
NOT_A_VALUE = "Expected `{name}` to contain keys, got a value. Set `{name}.KEY=…`; `--help {name}` lists the keys."


def _key(default: Any, prose: str, *, least: float | None = None, above: float | None = None) -> Any:
    """Creates a key with a default, a description, a minimum `least`, and an exclusive lower bound `above`."""
    return field(default=default, metadata={"prose": prose, "least": least, "above": above})


@dataclass
class Limits:
    """The limits of one episode (`limits`)."""

    steps: int | None = _key(250, "maximum number of LLM responses per episode", least=1)
    tokens: int | None = _key(None, "maximum number of prompt and generated tokens per episode", least=1)
    cost: float | None = _key(None, "maximum cost of an episode in US dollars", above=0)


@dataclass
class Timeouts:
    """Time limits in seconds, and their multipliers (`timeouts`). `null` uses the limit of the task."""

    policy: float | None = _key(1800.0, "time limit of one policy response in seconds, including retries", above=0)
    agent: float | None = _key(None, "time limit of the agent in seconds, instead of the task's limit", above=0)
    agent_max: float | None = _key(None, "upper bound on a task's time limit for the agent, in seconds", above=0)
    agent_multiplier: float | None = _key(
        None, "multiplier of the agent's time limit, instead of `multiplier`", above=0
    )
    verifier: float | None = _key(None, "time limit of the verifier in seconds, instead of the task's limit", above=0)
    verifier_max: float | None = _key(None, "upper bound on a task's time limit for the verifier, in seconds", above=0)
    verifier_multiplier: float | None = _key(
        None, "multiplier of the verifier's time limit, instead of `multiplier`", above=0
    )
    build_multiplier: float | None = _key(
        None, "multiplier of the time limit for the start of a container, instead of `multiplier`", above=0
    )
    multiplier: float = _key(1.0, "multiplier of all time limits of the tasks", above=0)


@dataclass
class Branch:
    """Changes of the request or response at the first step of each branch (`branch`), if `branch_from` is set."""

    inject: str | None = _key(None, "a user message to append to the pending request")
    edit: str | None = _key(None, "new text for the last message of the pending request")
    response: str | None = _key(None, "the first response of every branch, instead of a response of the policy")


@dataclass
class ExperimentConfig:
    """The top-level keys. `null` means no limit, unless the description of a key defines another meaning."""

    env: Any = "???"
    agent: Any = "???"
    container: Any = "???"
    policy: Any = "???"
    wrapper: Any = "???"
    collector: Any = "???"
    tracker: Any = "???"
    snapshot: Any = "???"
    executor: Any = "???"
    scorer: Any = None
    name: str = _key("default", "name of the experiment: outputs/<name>/<date>_<time>")
    attempts: int = _key(1, "number of attempts per task", least=1)
    concurrency: int = _key(4, "number of episodes that run at the same time", least=1)
    seed: int = _key(0, "seed of all random choices", least=0)
    objective: str = _key("mean_reward", "metric (`stat/…`) that a sweeper maximizes and that ranks jobs")
    reward_threshold: float = _key(1.0, "minimum reward of a passed attempt (for pass@k, pass^k, flakiness)")
    verify_on_truncation: bool = _key(True, "run the verifier on episodes that reached a limit")
    limits: Limits = field(default_factory=Limits, metadata={"prose": "limits of an episode"})
    timeouts: Timeouts = field(default_factory=Timeouts, metadata={"prose": "time limits in seconds, and multipliers"})
    budget: Any = field(default=None, metadata={"prose": "limits of a run or sweep, such as budget.cost=5"})
    retry: Any = field(default=None, metadata={"prose": "retries after errors, such as retry.infrastructure=true"})
    resume: bool = _key(False, "RUN or SWEEP to continue, or true to continue the run in hydra.run.dir, if it exists")
    resume_redo: list[str] | None = _key(  # noqa: RUF009  # the default is None, which is immutable
        None, "outcomes of attempts to run again, such as [policy_error]"
    )
    resume_force: bool = _key(False, "resume even if tasks, agent or policy have changed")
    replay: str | None = _key(None, "RUN or RUN/EPISODE to replay; its requests are compared with the recording")
    branch_from: str | None = _key(None, "RUN/EPISODE@STEP: the recorded step where new branches start")
    branches: int = _key(1, "number of branches", least=1)
    branch: Branch = field(default_factory=Branch, metadata={"prose": "first step of each branch"})


KEYS = tuple(item.name for item in fields(ExperimentConfig) if item.name not in GROUPS)
"""Names of the top-level keys that are not groups."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key whose value this module validates: dotted name, default, description, minimum and exclusive lower bound."""

    name: str
    default: Any
    prose: str
    least: float | None
    above: float | None


def keys() -> list[Key]:
    """Returns the keys whose values this module validates, in order. Excludes groups, `budget` and `retry`."""
    return list(_keys(ExperimentConfig(), ""))


def _keys(node: Any, prefix: str) -> Iterator[Key]:
    for item in fields(node):
        default = getattr(node, item.name)
        if is_dataclass(default):
            yield from _keys(default, f"{item.name}.")
        elif "least" in item.metadata:
            yield Key(f"{prefix}{item.name}", default, **item.metadata)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = value[name]
    return value


def validate(config: Mapping[str, Any]) -> None:
    """Checks the names and ranges of the top-level keys. Raises `ConfigError`. Hydra has already checked the types."""
    known = [item.name for item in fields(ExperimentConfig)]
    for name in config:
        if name not in known:
            raise ConfigError(f"There is no key `{name}`.{close_matches(name, known)} `--help` lists all keys.")
    for name in MADE_NODES:
        if not isinstance(config[name], Mapping):
            raise ConfigError(NOT_A_VALUE.format(name=name))
    for key in keys():
        _check_range(key, value_of(config, key.name))
    outcomes = [outcome.value for outcome in Outcome]
    for outcome in config["resume_redo"] or ():
        if outcome not in outcomes:
            close = close_matches(outcome, outcomes)
            raise ConfigError(f"Expected outcomes in `resume_redo` ({', '.join(outcomes)}), got {outcome!r}.{close}")
    name = config["name"]
    if not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"Expected `name` to be a folder name without slashes, got {name!r}.")


def _check_range(key: Key, value: Any) -> None:
    if value is None or isinstance(value, str | bool | list):
        return
    too_low = (key.least is not None and not value >= key.least) or (key.above is not None and not value > key.above)
    if not too_low and math.isfinite(value):
        return
    if key.least is not None:
        expected = f"at least {key.least:g}"
    else:
        expected = "a finite number" if key.above is None else f"a number above {key.above:g}"
    optional = f", or drop the limit with `{key.name}=null`" if key.default is None else ""
    raise ConfigError(f"Expected `{key.name}` to be {expected}, got {value!r}. Set `{key.name}=…`{optional}.")
