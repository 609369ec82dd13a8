"""Runs the installed `git` with limits, and with settings that prevent a repository from starting programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ares_exp.errors import GitError, PreflightError
from ares_exp.tasks.child_process import ChildFailedError, ChildProcess
from ares_exp.tasks.task_sources.git_names import GIT_PROTOCOLS

# The user's settings for all repositories apply, such as credentials, proxies and keys. Other variables of git are
# removed, because they may select another repository (as in a hook) or change the output.
_PASSED_ON = ("GIT_ASKPASS", "GIT_CONFIG", "GIT_PROXY", "GIT_SSH", "GIT_SSL")
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "GIT_ALLOW_PROTOCOL": ":".join(GIT_PROTOCOLS),  # not ext:: and fd::, which start programs
    "LC_ALL": "C",
}
_SETTINGS = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"),
    *("submodule.recurse=false", "fetch.recurseSubmodules=false", "advice.detachedHead=false"),
    *("core.autocrlf=false", "core.eol=lf"),  # the same files on every machine
)


class Git:
    """Runs git commands, one after the other.

    Attributes:
        timeout_sec: Time limit in seconds of one command.
        stop: Function that kills the running command, and prevents the start of further commands.
        stopped: Event that `stop` sets.
    """

    def __init__(self, *, timeout_sec: float) -> None:
        self.timeout_sec = timeout_sec
        self._child = ChildProcess()
        self.stop, self.stopped = self._child.stop, self._child.stopped

    def run(
        self,
        *arguments: str,
        git_dir: Path | None = None,
        work_tree: Path | None = None,
        settings: Sequence[str] = (),
    ) -> bytes:
        """Runs a command and returns its output. `settings` have the form `name=value`. Blocking.

        Untrusted arguments must be validated, or come after `--`.

        Raises:
            PreflightError: Git is missing, failed (`GitError`), took too long, printed too much, or was stopped.
        """
        program = shutil.which("git")
        if program is None:
            raise PreflightError(
                "Tasks in git repositories need the program `git`, which is not on PATH. Install git, or "
                "use a local folder with `env.path=<folder>`."
            )
        places = [f"--git-dir={git_dir}"] if git_dir is not None else []
        places += [f"--work-tree={work_tree}"] if work_tree is not None else []
        options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        what = f"`git {arguments[0]}`"
        try:
            ended = self._child.run(
                [program, *places, *options, *arguments], env=env | _ENVIRONMENT, timeout_sec=self.timeout_sec
            )
        except ChildFailedError as error:
            raise PreflightError(
                f"{what} {error}. Check that the repository is reachable, or set a higher `env.git_timeout_sec`."
            ) from None
        if ended.exit_code != 0:
            said = " ".join(ended.errors[-4:]).rstrip(".") or "it printed nothing"
            raise GitError(f"{what} failed with exit code {ended.exit_code}: {said}.")
        return ended.output
