"""The root config: each top-level key's type, default, range and prose, once.

The groups (`env`, `policy`, …) are plain `_target_` nodes: the constructors behind them validate their own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.results import Outcome

GROUPS = (
    *("env", "agent", "container", "policy", "wrapper", "collector", "tracker", "snapshot", "retry", "budget"),
    "executor",
    "trainer",
)


def _key(
    default: Any,
    prose: str,
    *,
    least: float | None = None,
    above: float | None = None,
) -> Any:
    """Makes a key with its default, its description and its bounds."""
    return field(default=default, metadata={"prose": prose, "least": least, "above": above})


@dataclass
class ExperimentConfig:
    """Everything that can be set at the top level. `null` means no limit unless it says otherwise."""

    env: Any = field(default="???")
    agent: Any = field(default="???")
    container: Any = field(default="???")
    policy: Any = field(default="???")
    wrapper: Any = field(default="???")
    collector: Any = field(default="???")
    tracker: Any = field(default="???")
    snapshot: Any = field(default="???")
    retry: Any = field(default="???")
    budget: Any = field(default="???")
    executor: Any = field(default="???")
    trainer: Any = field(default="???")
    name: str = _key("default", "name of the experiment: outputs/<name>/<date>_<time>")
    attempts: int = _key(1, "episodes per task", least=1)
    concurrency: int = _key(4, "episodes at the same time", least=1)
    seed: int = _key(0, "seed of everything that is drawn", least=0)
    step_limit: int | None = _key(250, "LLM responses per episode", least=1)
    token_limit: int | None = _key(None, "prompt and generated tokens per episode", least=1)
    cost_limit: float | None = _key(None, "US dollars per episode", above=0)
    verify_on_truncation: bool = _key(True, "whether an episode that a limit cut short is still verified")
    policy_timeout_sec: float | None = _key(
        1800.0, "seconds that the policy may take for one answer, retries included", above=0
    )
    timeout_multiplier: float = _key(1.0, "multiplies every time limit of the tasks", above=0)
    agent_timeout_sec: float | None = _key(
        None, "agent limit in seconds, in place of the tasks' own (null: theirs)", above=0
    )
    agent_timeout_max_sec: float | None = _key(None, "cap on the tasks' agent limits", above=0)
    agent_timeout_multiplier: float | None = _key(None, "in place of timeout_multiplier for the agent", above=0)
    verifier_timeout_sec: float | None = _key(
        None, "verifier limit in seconds, in place of the tasks' own (null: theirs)", above=0
    )
    verifier_timeout_max_sec: float | None = _key(None, "cap on the tasks' verifier limits", above=0)
    verifier_timeout_multiplier: float | None = _key(None, "in place of timeout_multiplier for the verifier", above=0)
    environment_build_timeout_multiplier: float | None = _key(
        None, "in place of timeout_multiplier for container starts", above=0
    )
    reward_threshold: float = _key(1.0, "reward from which on an attempt has passed: pass@k, pass^k, flakiness")
    resume: bool = _key(
        False, "<run> or <sweep>: go on with it; true: with what is in the run's directory, if anything"
    )
    resume_redo: list[str] | None = _key(  # noqa: RUF009  # its default is None
        None, "outcomes of attempts that are to be tried again, e.g. [policy_error]"
    )
    resume_force: bool = _key(False, "resume although tasks, agent or policy are not the same any more")
    objective: str = _key(
        "mean_reward", "what a sweeper looks for the most of, and how jobs are ranked: a metric (`stat/…`)"
    )
    replay: str | None = _key(None, "<run> or <run>/<episode>: play what it recorded again, and compare")
    branch_from: str | None = _key(None, "<run>/<episode>@<step>: go on from there, composed as that run was")
    branches: int = _key(1, "how many times to go on from there", least=1)
    branch_inject: str | None = _key(None, "a user message that comes after those of the pending request")
    branch_edit: str | None = _key(None, "the text of the pending request's last message, in place of its own")
    branch_answer: str | None = _key(None, "the first answer of every branch, in place of the policy's")


def keys() -> list[Field[Any]]:
    """Returns the top-level keys that are not groups, in order."""
    return [item for item in fields(ExperimentConfig) if item.name not in GROUPS]


def validate(config: Mapping[str, Any]) -> None:
    """Checks the ranges of the top-level keys; their types and names were checked when the config was composed.

    Raises:
        ConfigError: With the key, the expected range, the actual value and the remedy.
    """
    known = [item.name for item in fields(ExperimentConfig)]
    for name in config:
        if name not in known:
            raise ConfigError(f"There is no key `{name}`.{close_matches(name, known)} `--help` lists what there is.")
    for item in keys():
        value, least, above = config[item.name], item.metadata.get("least"), item.metadata.get("above")
        if value is None or isinstance(value, str | bool | list):
            continue
        too_low = (least is not None and not value >= least) or (above is not None and not value > above)
        if too_low or not math.isfinite(value):
            if least is not None:
                expected = f"at least {least:g}"
            else:
                expected = "a finite number" if above is None else f"a number above {above:g}"
            optional = f", or drop the limit with `{item.name}=null`" if item.default is None else ""
            raise ConfigError(f"Expected `{item.name}` to be {expected}, got {value!r}. Set `{item.name}=…`{optional}.")
    outcomes = [outcome.value for outcome in Outcome]
    for outcome in config["resume_redo"] or ():
        if outcome not in outcomes:
            close = close_matches(outcome, outcomes)
            raise ConfigError(f"Expected `resume_redo` to name some of {', '.join(outcomes)}, got {outcome!r}.{close}")
    name = config["name"]
    if not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"Expected `name` to be a folder name without slashes, got {name!r}.")
