"""Flags of the command line: error messages for unknown flags, and a fix for Hydra on Python 3.14."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ares_exp.config.schema import GROUPS, KEYS
from ares_exp.errors import closest

FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
"""Hydra's flags. Hydra also accepts a unique prefix of a flag."""
SHORT_FLAGS = ("-h", "-c", "-p", "-r", "-m", "-i", "-sc", "-cp", "-cn", "-cd")
OTHERS_CALL_IT = {
    "n": "concurrency", "n_concurrent": "concurrency", "k": "attempts", "n_attempts": "attempts",
    "d": "env.dataset", "dataset": "env.dataset", "t": "env.tasks", "task_name": "env.tasks", "path": "env.path",
    "model": "policy=openai policy.model", "temperature": "policy.temperature", "a": "agent",
    "timeout_multiplier": "timeouts.multiplier", "agent_timeout_multiplier": "timeouts.agent_multiplier",
    "verifier_timeout_multiplier": "timeouts.verifier_multiplier",
    "environment_build_timeout_multiplier": "timeouts.build_multiplier",
    "o": "hydra.run.dir", "output_dir": "hydra.run.dir", "jobs_dir": "hydra.run.dir",
}  # fmt: skip
"""Flags of similar programs, such as `--n-concurrent`, and the equivalent overrides of `ares-exp`."""


def explain_flags(argv: Sequence[str]) -> str | None:
    """Returns an error message for the first unknown flag, with a suggested override; `None` if all flags exist."""
    for position, argument in enumerate(argv):
        flag, _, value = argument.partition("=")
        if not _is_unknown(flag):
            continue
        if not value and position + 1 < len(argv) and not argv[position + 1].startswith("-"):
            value = argv[position + 1]
        return _answer(flag, value if "=" not in value else "")
    return None


def _is_unknown(flag: str) -> bool:
    if flag.startswith("--"):
        return not any(known.startswith(flag) for known in FLAGS)
    return flag.startswith("-") and not flag.startswith(SHORT_FLAGS)


def _answer(flag: str, value: str) -> str:
    name = flag.strip("-").replace("-", "_")
    settable = (*KEYS, *GROUPS)
    key = name if name in settable else OTHERS_CALL_IT.get(name)
    if key is None:
        near = closest(name, settable)
        meant = f" Did you mean `{near[0]}={value or '…'}`?" if near else ""
    else:
        meant = f" In ares_exp, use `{key}={value or '…'}`."
    return (
        f"There is no flag `{flag}`.{meant} To set a key, write `key=value` without dashes. "
        "`--help` lists keys and flags."
    )


@contextmanager
def unchecked_help() -> Iterator[None]:
    """Makes argparse accept any object as a help text while the context is active.

    This works around an error of Hydra on Python 3.14. For `--shell-completion`, Hydra up to 1.3.8 passes a help object
    that is not a string, but Python 3.14 requires a string. Remove this function when the lower bound of `hydra-core`
    includes the fix.
    """
    if sys.version_info[:2] != (3, 14):
        yield
        return
    add_checked = argparse.ArgumentParser.add_argument

    def add_unchecked(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        text = options.pop("help", None)
        action = add_checked(parser, *names, **options)
        action.help = text
        return action

    argparse.ArgumentParser.add_argument = add_unchecked
    try:
        yield
    finally:
        del argparse.ArgumentParser.add_argument  # restores the inherited method
