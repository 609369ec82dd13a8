"""The entry point of the command line: runs a command such as `show`, or starts a run or sweep.

It also completes commands, flags, paths, runs and tasks when the user presses Tab. The shell then runs the program with
`-sc query=SHELL`, and with the typed line in the environment variable `COMP_LINE`. The program prints candidates, and
the shell offers the candidates that start with the last word. If there are none, the shell completes file names. Hydra
completes config options and keys.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from ares_exp import __version__
from ares_exp.commands.cli.run_command import COMMANDS, parser_of, paths, run_command
from ares_exp.config.overrides import with_home
from ares_exp.config.schema import GROUPS, KEYS
from ares_exp.errors import close_matches, closest
from ares_exp.records import exit_codes
from ares_exp.records.run_dir import refuse_used_run_dir
from ares_exp.records.terminal_text import print_error

HELP = {"--help", "-h"}
COMPLETION = {"-sc", "--shell-completion"}
RUN_WORDS = ("run", "start", "play", "execute", "eval", "evaluate", "rollout", "exec")
"""Words that start a run in other programs. They are errors here, and the message explains how to start a run."""
COMMANDS_OF_OTHERS = {
    "help": "--help", "version": "--version", "ls": "list", "log": "show", "logs": "show",
    "upload": "wandb sync", "cleanup": "clean", "prune": "clean", "gc": "snapshots gc", "sweep": "-m",
}  # fmt: skip
"""Commands of other programs, and the equivalent commands or flags of `ares-exp`."""
FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
"""Hydra's flags. Hydra also accepts a unique prefix of a flag."""
SHORT_FLAGS = ("-h", "-c", "-p", "-r", "-m", "-i", "-sc", "-cp", "-cn", "-cd")
FLAGS_OF_OTHERS = {
    "n": "concurrency", "n_concurrent": "concurrency", "k": "attempts", "n_attempts": "attempts",
    "d": "env.dataset", "dataset": "env.dataset", "t": "env.tasks", "task_name": "env.tasks", "path": "env.path",
    "model": "policy=openai policy.model", "temperature": "policy.temperature", "a": "agent",
    "timeout_multiplier": "timeouts.multiplier", "agent_timeout_multiplier": "timeouts.agent_multiplier",
    "verifier_timeout_multiplier": "timeouts.verifier_multiplier",
    "environment_build_timeout_multiplier": "timeouts.build_multiplier",
    "o": "hydra.run.dir", "output_dir": "hydra.run.dir", "jobs_dir": "hydra.run.dir",
}  # fmt: skip
"""Flags of similar programs, such as `--n-concurrent`, and the equivalent overrides of `ares-exp`."""
SETTABLE = (*KEYS, *GROUPS)
WITH_PATH = re.compile(r"(resume|replay|branch_from|--config-dir|\S*(path|dir|trajectory))=")
"""Pattern that matches keys and flags whose value is a path."""
WITHOUT_BLANK = 'COMPREPLY=($( compgen -o nospace -o default -W "$choices" -- "$word" ));'
WITH_BLANK = f'{WITHOUT_BLANK}\n        [[ ${{#COMPREPLY[@]}} == 1 && $COMPREPLY != *[=./] ]] && COMPREPLY[0]+=" "'
"""Replacement for the line `WITHOUT_BLANK` in Hydra's completion script, which never adds a space after a candidate.

The new line adds a space if there is only one candidate, and the candidate does not end with `=`, `.` or `/`.
"""


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
        with redirect_stdout(io.StringIO()) as script:
            exit_code = _run(sys.argv[1:])
        sys.stdout.write(script.getvalue().replace(WITHOUT_BLANK, WITH_BLANK))
        return exit_code
    return _run(sys.argv[1:])


def _run(arguments: Sequence[str]) -> int:
    """Checks the arguments, and starts the run or sweep. Returns the exit code."""
    from ares_exp.config.options import config_dirs_of, print_problems, refuse_unreadable

    folders = config_dirs_of(arguments)
    refused = explain_flags(arguments) or refuse_unreadable(folders) or refuse_used_run_dir(arguments)
    if refused is not None:
        print_error(refused)
        return exit_codes.USAGE
    if not COMPLETION & set(arguments):  # a shell asks for completions at every press of Tab
        print_problems(folders)
    from ares_exp.commands.cli.hydra_run import end_sweep, run_hydra

    return end_sweep(run_hydra())


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
    value = rest[0] if rest and "=" not in rest[0] else "…"
    if word in RUN_WORDS:
        return f" To start a run, leave out this word: `{' '.join([program, *map(shlex.quote, rest)])}`."
    if word in COMMANDS_OF_OTHERS:
        return f" In ares_exp, use `{program} {COMMANDS_OF_OTHERS[word]}`."
    if word in SETTABLE:
        return f" To set a key, write `{program} {word}={value}`."
    if Path(word).is_dir():
        return f" To look at a run: `{program} show {word}`; to run tasks in it: `{program} env.path={word}`."
    return close_matches(word, [*COMMANDS, *SETTABLE])


def _complete() -> int:
    """Prints the candidates for Tab completion; prints nothing if the candidates cannot be determined."""
    found, is_hydra_asked = candidates()
    if found:
        sys.stdout.write("\n".join(found) + "\n")
    if is_hydra_asked:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            _run(sys.argv[1:])
    return exit_codes.COMPLETE


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
    key = name if name in SETTABLE else FLAGS_OF_OTHERS.get(name)
    if key is None:
        near = closest(name, SETTABLE)
        meant = f" Did you mean `{near[0]}={value or '…'}`?" if near else ""
    else:
        meant = f" In ares_exp, use `{key}={value or '…'}`."
    return (
        f"There is no flag `{flag}`.{meant} To set a key, write `key=value` without dashes. "
        "`--help` lists keys and flags."
    )


def candidates() -> tuple[list[str], bool]:
    """Returns the candidates for the line in `COMP_LINE`, and whether Hydra has to print its own candidates as well."""
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")  # the position of the cursor, if the shell reports it
    with_program = line[: int(point) if point.isdecimal() else len(line)].split(" ")
    typed = [word for word in with_program[1:-1] if word]
    last = with_program[-1] if len(with_program) > 1 else ""
    if typed and typed[0] in COMMANDS:
        return parser_of(typed[0], typed[0]).candidates(typed[1:], last), False
    if typed[-1:] == ["--config-dir"]:
        return paths(last), False
    if (key := WITH_PATH.match(last)) and (found := paths(last[key.end() :])):
        return [f"{key[0]}{path}" for path in found], False
    if listed := re.match(r"env\.tasks=(.*[\[,])?", last):
        return [f"{listed[0]}{name}" for name in _tasks(typed) if name.startswith(last[listed.end() :])], False
    if last.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(last)], False
    return ([] if typed else [name for name in COMMANDS if name.startswith(last)]), True


def _tasks(typed: Sequence[str]) -> list[str]:
    """Returns the task names for `env.tasks=`, from the typed `env.path=` folder or, by default, the bundled tasks."""
    from ares_exp.tasks.task_set import SAMPLES

    folders = [Path(word.partition("=")[2]).expanduser() for word in typed if word.startswith("env.path=")]
    return sorted(file.parent.name for file in (folders or [SAMPLES])[-1].glob("*/task.toml"))
