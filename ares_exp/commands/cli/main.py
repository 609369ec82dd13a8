"""The entry point of the command line: runs a command such as `show`, or starts a run or sweep."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from ares_exp import __version__
from ares_exp.commands.cli.run_command import COMMANDS, run_command
from ares_exp.config.overrides import flags_and_overrides, with_home
from ares_exp.errors import SweepInterrupted, UserError, close_matches
from ares_exp.records import exit_codes
from ares_exp.records.run_dir import refuse_used_run_dir
from ares_exp.records.terminal_text import print_error

HELP = {"--help", "-h"}
COMPLETION = {"-sc", "--shell-completion"}
RUN_WORDS = ("run", "start", "play", "execute", "eval", "evaluate", "rollout", "exec")
"""Words that start a run in other programs. They are errors here, and the message explains how to start a run."""
OTHERS_CALL_IT = {
    "help": "--help", "version": "--version", "ls": "list", "log": "show", "logs": "show",
    "upload": "wandb sync", "cleanup": "clean", "prune": "clean", "gc": "snapshots gc", "sweep": "-m",
}  # fmt: skip
"""Commands of other programs, and the equivalent commands or flags of `ares-exp`."""


def program() -> str:
    """Returns the command that started this program: `ares-exp` or `python -m ares_exp`."""
    return "python -m ares_exp" if Path(sys.argv[0]).name == "__main__.py" else "ares-exp"


def main() -> int:
    """Runs the command line in `sys.argv` and returns the exit code."""
    # Allows imports from the current directory, like `python -m ares_exp`. Installed packages have priority.
    with suppress(FileNotFoundError):  # the current directory may be deleted
        if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
    if (exit_code := run_word(sys.argv[1:], program())) is not None:
        return exit_code
    sys.argv[1:] = with_home(sys.argv[1:])
    if "--version" in sys.argv[1:]:
        sys.stdout.write(f"ares_exp {__version__}\n")
        return exit_codes.COMPLETE
    if HELP & set(sys.argv[1:]):
        from ares_exp.commands.cli.help import print_help

        return print_help(sys.argv[1:], program())
    if len(sys.argv) == 3 and sys.argv[1] in COMPLETION and sys.argv[2].startswith("query="):
        return _complete()
    if len(sys.argv) == 3 and sys.argv[1] in COMPLETION and sys.argv[2] in ("install=bash", "install=zsh"):
        from ares_exp.commands.cli.completion import WITH_BLANK, WITHOUT_BLANK

        with redirect_stdout(io.StringIO()) as script:
            exit_code = _run()
        sys.stdout.write(script.getvalue().replace(WITHOUT_BLANK, WITH_BLANK))
        return exit_code
    exit_code = _run()
    from ares_exp.commands.cli.hydra_callback import end_sweep

    return end_sweep(exit_code)


def run_word(argv: Sequence[str], program: str) -> int | None:
    """Runs the command at the start of a command line and returns its exit code; `None` if the line starts a run.

    `--help COMMAND` is equivalent to `COMMAND --help`.
    """
    if argv and argv[0] in HELP and set(argv[1:2]) & COMMANDS.keys():
        argv = [*argv[1:], argv[0]]
    if not argv or "=" in argv[0] or argv[0].startswith(("-", "+", "~")):  # an override or a flag
        return None
    if argv[0] in COMMANDS:
        return run_command(argv[0], argv[1:], f"{program} {argv[0]}")
    from ares_exp.config.options import OPTION_GROUPS
    from ares_exp.config.schema import KEYS

    if argv[0] in (*OPTION_GROUPS, *KEYS) and HELP & set(argv):
        return None  # the help describes it
    print_error(_explain(argv[0], argv[1:], program))
    return exit_codes.USAGE


def _explain(word: str, rest: Sequence[str], program: str) -> str:
    """Returns the error message for a command line that starts with an unknown command, with a suggestion."""
    meant = _meant(word, rest, program) or f" Expected one of {', '.join(COMMANDS)}."
    return (
        f"There is no command `{word}`.{meant} A word without `=` is the name of a command. To start a "
        f"run, use `{program} key=value …`. `{program} --help` lists commands and keys."
    )


def _meant(word: str, rest: Sequence[str], program: str) -> str:
    """Returns a space and a sentence that suggests what the user may have meant; empty without a suggestion."""
    from ares_exp.config.schema import GROUPS, KEYS

    settable = (*KEYS, *GROUPS)
    value = rest[0] if rest and "=" not in rest[0] else "…"
    if word in RUN_WORDS:
        return f" To start a run, leave out this word: `{' '.join([program, *map(shlex.quote, rest)])}`."
    if word in OTHERS_CALL_IT:
        return f" In ares_exp, use `{program} {OTHERS_CALL_IT[word]}`."
    if word in settable:
        return f" To set a key, write `{program} {word}={value}`."
    if Path(word).is_dir():
        return f" To look at a run: `{program} show {word}`; to run tasks in it: `{program} env.path={word}`."
    return close_matches(word, [*COMMANDS, *settable])


def _complete() -> int:
    """Prints the candidates for Tab completion; prints nothing if the candidates cannot be determined."""
    from ares_exp.commands.cli.completion import candidates

    found, is_hydra_asked = candidates()
    if found:
        sys.stdout.write("\n".join(found) + "\n")
    if is_hydra_asked:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            _run()
    return exit_codes.COMPLETE


def _run() -> int:
    """Checks the arguments in `sys.argv`, and lets Hydra run the job or the jobs of a sweep. Returns the exit code."""
    import hydra

    from ares_exp.commands.cli.flags import explain_flags, unchecked_help
    from ares_exp.commands.cli.hydra_callback import SweepRefused
    from ares_exp.commands.cli.job import JobFunction
    from ares_exp.config.hydra_setup import set_up_hydra, store_recorded_config
    from ares_exp.config.options import ROOT_CONFIG, conf_dir, config_dirs_of, print_problems, refuse_unreadable
    from ares_exp.runs.resume.session import names_recorded_run

    arguments = sys.argv[1:]
    refused = explain_flags(arguments) or refuse_unreadable(config_dirs_of(arguments)) or refuse_used_run_dir(arguments)
    if refused is not None:
        print_error(refused)
        return exit_codes.USAGE
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors; it would print some and exit with 1
    set_up_hydra(config_dirs_of(sys.argv[1:]))
    if not COMPLETION & set(sys.argv[1:]):  # a shell asks for completions at every press of Tab
        print_problems(config_dirs_of(sys.argv[1:]))
    source, root_config, job = None, ROOT_CONFIG, JobFunction()
    try:
        flags, overrides = flags_and_overrides(sys.argv[1:])
        if names_recorded_run(overrides):
            from ares_exp.runs.resume.compose_from_run import compose_from_run

            command = compose_from_run(flags, overrides)
            source = command.source
            if command.values is not None:
                root_config = store_recorded_config(command.values, command.choices)
            flags, overrides = flags_and_overrides(command.argv)
        sys.argv[1:] = [*flags, *overrides]
        with unchecked_help():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=root_config)(job)()
    except SweepRefused as refused:
        print_error(str(refused))
        return exit_codes.USAGE
    except (KeyboardInterrupt, SweepInterrupted):
        return exit_codes.INTERRUPTED
    except Exception as error:  # errors of jobs are not raised here
        return _explained(error, source, root_config)
    return job.exit_code


def _explained(error: Exception, source: Path | None, root_config: str) -> int:
    """Prints an error of the config, a launcher or a sweeper; returns the exit code. Raises unexpected errors again."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from ares_exp.commands.cli.hydra_callback import SweepCallback
    from ares_exp.config.explain import explain, is_below_a_list

    if SweepCallback.interruption is not None and SweepCallback.interruption.requested:
        return exit_codes.INTERRUPTED
    if isinstance(error, UserError):
        print_error(str(error))
    elif isinstance(error, HydraException | OmegaConfBaseException | YAMLError | OSError | ValueError) or (
        isinstance(error, TypeError) and is_below_a_list(error)
    ):
        taken = f" (The overrides recorded in {source} also apply.)" if source is not None else ""
        print_error(f"{explain(error, sys.argv[1:], root_config)}{taken}")
    elif SweepCallback.sweep_dir is None:
        raise error
    else:
        print_error(f"Hydra's launcher or sweeper failed: {type(error).__name__}: {error}")
        return exit_codes.INCOMPLETE
    return exit_codes.USAGE
