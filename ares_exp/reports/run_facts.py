"""The main facts about a run, such as its options, model and seed, and the command line that started it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from ares_exp.records.recorded_results import last_attempts, object_or_empty
from ares_exp.records.run_dir import RunDir

GROUPS = ("env", "agent", "container", "policy")
PROGRAM = "ares-exp"


def run_facts(run: RunDir) -> dict[str, str]:
    """Returns the main settings of a run by config key, such as `env`, `model` and `seed`. Omits unknown values."""
    choices = object_or_empty(run.provenance).get("choices")
    options = choices if isinstance(choices, Mapping) else {}
    values = object_or_empty(run.config)
    policy = values.get("policy")
    found = {
        **{group: options.get(group) for group in GROUPS},
        "model": policy.get("model") if isinstance(policy, Mapping) else None,
        "attempts": last_attempts(run) or values.get("attempts"),  # a resume can raise them
        "seed": values.get("seed"),
    }
    return {key: str(value) for key, value in found.items() if isinstance(value, str | int)}


def command_line(run: RunDir) -> str | None:
    """Returns the command line that started a run, which can be pasted into a shell; `None` if it is not recorded."""
    words = object_or_empty(run.provenance).get("argv")
    if not isinstance(words, list) or not words:
        return None
    program, *arguments = map(str, words)
    is_own = Path(program).name == PROGRAM or Path(program).parts[-2:] == ("ares_exp", "__main__.py")
    return shlex.join([PROGRAM if is_own else program, *arguments])
