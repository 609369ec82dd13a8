"""The command line: compose -> validate -> prepare -> run -> summary, with clear errors and exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ares_exp import exit_codes


def main() -> int:
    """Runs the command line in `sys.argv` and returns the exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from ares_exp.cli_help import print_help

        print_help(sys.argv[1:])
        return exit_codes.COMPLETE
    exit_code = _run()
    from ares_exp.sweeps.hydra_callback import end_sweep

    return end_sweep(exit_code)


def _flags_and_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Apart, whatever the order in which they were typed: Hydra's parser takes flags first."""
    overrides = [one for one in arguments if one.startswith("~") or ("=" in one and not one.startswith("-"))]
    return [one for one in arguments if one not in overrides], overrides


def _run() -> int:
    """Runs one job, or the jobs of a sweep."""
    import hydra

    from ares_exp.conf_dir import conf_dir
    from ares_exp.derived_command import derive
    from ares_exp.hydra_setup import set_up_hydra
    from ares_exp.options import config_dirs_of, print_problems
    from ares_exp.run_dir import refuse_used_run_dir
    from ares_exp.short_overrides import in_full
    from ares_exp.sweeps.hydra_callback import SweepRefused
    from ares_exp.sweeps.interruption import SweepInterrupted
    from ares_exp.sweeps.job_function import JobFunction, print_error

    if (refusal := refuse_used_run_dir(sys.argv[1:])) is not None:
        print_error(refusal)
        return exit_codes.USAGE
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as exceptions; Hydra would print some and exit with 1
    set_up_hydra()
    if not {"-sc", "--shell-completion"} & set(sys.argv[1:]):  # what a shell asks at every press of Tab
        print_problems(config_dirs_of(sys.argv[1:]))
    source: Path | None = None
    job = JobFunction()
    try:
        command, source = derive(*_flags_and_overrides(sys.argv[1:]))
        flags, overrides = _flags_and_overrides(command)
        sys.argv[1:] = [*flags, *in_full(overrides)]
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()
    except SweepRefused as refused:
        print_error(str(refused))
        return exit_codes.USAGE
    except (KeyboardInterrupt, SweepInterrupted):
        return exit_codes.INTERRUPTED
    except Exception as error:  # none is a job's own
        return _explained(error, source)
    return job.exit_code


def _explained(error: Exception, source: Path | None) -> int:
    """Says what was wrong with a command, or with a sweep's way of running its jobs; returns the exit code."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from ares_exp.cli_errors import explain
    from ares_exp.errors import UserError
    from ares_exp.sweeps.hydra_callback import SweepCallback
    from ares_exp.sweeps.job_function import print_error

    if SweepCallback.interruption is not None and SweepCallback.interruption.requested:
        return exit_codes.INTERRUPTED
    if isinstance(error, UserError):
        print_error(str(error))
    elif isinstance(error, HydraException | OmegaConfBaseException | YAMLError | OSError | ValueError):
        taken = f" (The overrides that {source} recorded are in force, too.)" if source is not None else ""
        print_error(f"{explain(error, sys.argv[1:])}{taken}")
    elif SweepCallback.sweep_dir is None:
        raise error
    else:
        print_error(f"The launcher or the sweeper gave up: {type(error).__name__}: {error}")
        return exit_codes.INCOMPLETE
    return exit_codes.USAGE
