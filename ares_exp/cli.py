"""The command line: compose -> validate -> prepare -> run -> summary, with clear errors and exit codes.

Exit codes: 0 every episode asked for has a reward; 1 some have none; 2 the command line, the config or the preflight is
at fault; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main() -> int:
    """Runs the command line in `sys.argv` and returns the exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from ares_exp.cli_help import print_help

        print_help(sys.argv[1:])
        return EXIT_OK
    return _Command().run()


def _flags_and_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Apart, whatever the order in which they were typed: Hydra's parser takes flags first."""
    overrides = [one for one in arguments if one.startswith("~") or ("=" in one and not one.startswith("-"))]
    return [one for one in arguments if one not in overrides], overrides


class _Command:
    """One command line: one job, or the jobs of a sweep. The worst job's exit code is the command's."""

    def __init__(self) -> None:
        self._exit_code = EXIT_OK

    def run(self) -> int:
        import hydra
        from hydra.core.config_store import ConfigStore
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        from ares_exp.conf_dir import conf_dir
        from ares_exp.config import ExperimentConfig
        from ares_exp.derived_command import derive
        from ares_exp.errors import UserError
        from ares_exp.run_dir import fresh_dir, refuse_used_run_dir

        if (refusal := refuse_used_run_dir(sys.argv[1:])) is not None:
            return _fail(refusal)
        OmegaConf.register_new_resolver("fresh_dir", fresh_dir, replace=True, use_cache=True)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as exceptions; Hydra would print some and exit with 1
        ConfigStore.instance().store(name="ares_exp_schema", node=ExperimentConfig, provider="ares_exp")
        source: Path | None = None
        try:
            sys.argv[1:], source = derive(*_flags_and_overrides(sys.argv[1:]))
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(self._job)()
        except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:  # none is a job's own
            from ares_exp.cli_errors import explain

            taken = f" (The overrides that {source} recorded are in force, too.)" if source is not None else ""
            return _fail(f"{explain(error, sys.argv[1:])}{taken}")
        except UserError as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        return self._exit_code

    def _job(self, config: DictConfig) -> float | None:
        """Runs one job; returns the mean reward (what a sweeper optimises), `None` when there is none."""
        from ares_exp.errors import UserError
        from ares_exp.job import run_job

        try:
            summary = run_job(config)
        except UserError as error:
            self._exit_code = max(self._exit_code, _fail(str(error)))
            return None
        except Exception:
            logging.getLogger(__name__).exception("This is a bug in ares_exp or in a component of your own")
            self._exit_code = max(self._exit_code, EXIT_INCOMPLETE)
            return None
        if summary.interrupted:
            raise KeyboardInterrupt
        if not summary.complete:
            self._exit_code = max(self._exit_code, EXIT_INCOMPLETE)
        return summary.mean_reward


def _fail(message: str) -> int:
    """Prints one paragraph to stderr; returns the exit code of a user's mistake."""
    width = 100 if sys.stderr.isatty() else 10_000
    paragraph = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in message.splitlines())
    sys.stderr.write(f"error: {paragraph}\n")
    return EXIT_USAGE
