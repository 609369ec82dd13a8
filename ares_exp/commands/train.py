"""The command `train`: runs with a trainer, composed by Hydra like any other run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULTS = {"trainer": "grpo", "name": "train"}
"""Defaults of `train`: the run directory is outputs/train/<date>_<time>."""
NAMING_A_RUN = "resume"
DESCRIPTION = """\
Trains the policy in one run: the trainer chooses tasks, runs episodes, and updates the policy from their rewards. You
can set the same options and keys as for a run, except that `attempts` has no effect. `ares-exp --help trainer=grpo`
lists the arguments of the trainer.
"""
EPILOG = """\
Examples:
  %(prog)s env=harbor agent=tools policy=transformers policy.model=path/to/model trainer.steps=200
  %(prog)s env=harbor env.path=tasks 'trainer.heldout=["test-*"]' trainer.zero_std_groups=refill …
  %(prog)s resume=outputs/train/2026-01-01_12-00-00
  %(prog)s -m trainer.learning_rate=1e-6,1e-5 …

Exit codes: the same as for a run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: one training per combination of values")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="folder with your own options, as for a run")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from ares_exp.commands.cli.main import execute

    flags = ["-m"] if arguments.multirun else []
    if arguments.config_dir is not None:
        flags.append(f"--config-dir={arguments.config_dir}")
    sys.argv[1:] = [*flags, *with_defaults(arguments.overrides)]
    return execute()


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """Puts the defaults before the overrides, except for resumed runs, which have recorded them."""
    keys = {one.lstrip("+").partition("=")[0] for one in overrides}
    if NAMING_A_RUN in keys:
        return [*overrides]
    chosen = [*(f"{key}={value}" for key, value in DEFAULTS.items() if key not in keys), *overrides]
    return [f"+{one}" if one.startswith("trainer=") else one for one in chosen]  # the root config has no trainer
