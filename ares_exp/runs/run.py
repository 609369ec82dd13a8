"""The class `Run`, which executes a composed config: from the checks to the printed summary."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ares_exp.config.explain import explain
from ares_exp.config.hydra_setup import NOTHING_TO_RESUME, is_fresh_dir, scrub_hydra_records
from ares_exp.config.schema import validate
from ares_exp.errors import ConfigError
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import HYDRA_RECORDS, RunDir, resume_command
from ares_exp.records.secrets import RepeatedWarnings, SecretFilter, scrub, typed_secrets
from ares_exp.records.terminal_text import first_of, print_error
from ares_exp.reports.summary import render_job, render_summary
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.experiment import Experiment
from ares_exp.runs.resume.recorded_run import EpisodeRef, check_trust
from ares_exp.runs.resume.session import Session, check_package, close_session, collect_provenance, open_session
from ares_exp.runs.sweeps.jobs import job_label
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from hydra.conf import HydraConf
    from omegaconf import DictConfig

    from ares_exp.policies.replay import ReplayReport

SHOWN_TASKS = 10
_VERBS = {"branch": "branch_from", "replay": "replay"}
"""Config keys that name a recorded run from which a new run starts, by kind of the new run."""

logger = logging.getLogger(__name__)


class Run:
    """One run of an experiment, which can be executed once.

    Attributes:
        run_dir: Directory of the run.
        log_config: Logging config that Hydra composed (`hydra/job_logging`).
    """

    def __init__(
        self, config: DictConfig, hydra: HydraConf, *, quiet: bool = False, given: Mapping[str, Any] | None = None
    ) -> None:
        """Validates a composed config and creates its components. A resumed run uses its recorded config instead.

        If `quiet` is set, the run prints no progress and no summary. If `given` contains an object for a group, such as
        `policy`, this object is used instead of the group's config.

        Raises:
            UserError: The config is invalid, or a component cannot be created.
        """
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        self.run_dir, sweeps = RunDir(Path(hydra.runtime.output_dir)), hydra.mode == RunMode.MULTIRUN
        self.log_config: Any = OmegaConf.to_container(cast("Any", hydra.job_logging), resolve=True)
        if config.resume and not sweeps and is_fresh_dir(hydra.run):
            raise ConfigError(NOTHING_TO_RESUME.format(key="hydra.run.dir", what="run"))
        overrides = cast("list[str]", OmegaConf.to_container(cast("Any", hydra.overrides.task), resolve=False))
        scrub_hydra_records(self.run_dir.path / HYDRA_RECORDS, overrides)
        if config.resume and self.run_dir.has_run:
            from ares_exp.runs.resume.compose_from_run import keep_recorded

            check_trust(self.run_dir.path, forced=config.resume_force)
            if self.run_dir.service.is_dir() and "trainer" not in (given or {}):
                raise ConfigError(
                    f"The run in {self.run_dir.path} is a service for trainers. Use "
                    f"`{resume_command(self.run_dir.path)}` to continue it."
                )
            if changed := keep_recorded(config, self.run_dir, overrides):
                logger.warning(
                    "Options or defaults of %s have changed on disk. The run continues with the recorded values.",
                    ", ".join(changed),
                )
        values = _resolved(config)
        validate(values)
        sweep_dir = Path(hydra.sweep.dir) if sweeps else None
        self._group = f"{values['name']}/{sweep_dir.name}" if sweep_dir is not None else None
        self._job = job_label(sweep_dir, hydra.job.num, overrides) if sweep_dir is not None else None
        given = given or {}
        choices = hydra.runtime.choices.items()
        self._choices = {one: str(option) for one, option in choices if "/" not in one and one not in given}
        self._components = Components.of(config, given)
        self._experiment = Experiment(
            self._components, Settings.of(values, sweep_dir=sweep_dir), self.run_dir, quiet=quiet
        )
        objects = {one: {"_object_": type(part).__name__} for one, part in given.items() if one in values}
        self._config = scrub(values | objects)
        self._quiet = quiet
        self._preparing: asyncio.Future[Sequence[str]] | None = None
        self._interrupted = False

    async def execute(self) -> RunSummary:
        """Runs the checks, runs and records the episodes, and prints the summary.

        Raises:
            UserError: The run cannot start. No container was started.
            KeyboardInterrupt: The run was interrupted before the first episode.
        """
        preparing = self._preparing = asyncio.ensure_future(self._experiment.prepare())
        summary = None
        try:
            task_names = await preparing
            with self.run_dir.owned(resume=self._config["resume"]):
                session, info = await asyncio.to_thread(self._open_session, task_names)
                redo = self._config["resume_redo"] or ()
                summary = await self._experiment.run(task_names, info, earlier=session.earlier, redo=redo)
                close_session(self.run_dir, summary)
            self._show(summary)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            raise KeyboardInterrupt from None
        finally:
            await self._experiment.close(summary)
        filters = [one for handler in logging.getLogger().handlers for one in handler.filters]
        for line in (line for one in filters if isinstance(one, RepeatedWarnings) for line in one.told()):
            sys.stderr.write(f"warning: {line}\n")
        place = self._components.tracker.place
        if place is not None and self._job is None and not self._quiet:
            with suppress(BrokenPipeError):
                sys.stdout.write(f"{place}\n")
                sys.stdout.flush()
        return summary

    def interrupt(self) -> None:
        """Cancels running episodes and starts no others, so that `execute` returns or raises `KeyboardInterrupt`."""
        self._interrupted = True
        if self._preparing is not None:
            self._preparing.cancel()
        self._experiment.interrupt()

    def request_snapshots(self) -> None:
        """Requests a snapshot of every running episode."""
        self._experiment.request_snapshots()

    def _open_session(self, task_names: Sequence[str]) -> tuple[Session, RunInfo]:
        """Starts this session of the run. Returns the session and the information for trackers. Blocking."""
        source = self._components.source
        provenance = collect_provenance(task_set_path=source.path, task_origins=source.origins)
        provenance["choices"] = dict(self._choices)
        provenance["agent_version"] = self._components.effective_agent.version
        for parent in _parents(self._config):
            check_package(parent, provenance, forced=self._config["resume_force"])
        kind = "train" if self._components.trainer is not None else "run"
        digests = {name: source.digest(name) for name in task_names}
        try:
            session = open_session(self.run_dir, self._config, provenance, digests, self._experiment.warnings)
        except OSError as error:
            raise ConfigError(f"Cannot write in the run directory {self.run_dir.path}: {error}.") from error
        info = RunInfo(
            run_dir=self.run_dir.path,
            name=f"{self._config['name']}/{self.run_dir.path.name}",
            run_id=session.run_id,
            config=self._config,
            provenance=provenance,
            group=self._group,
            job_type=next((verb for verb, key in _VERBS.items() if self._config[key] is not None), kind),
            resumed=session.earlier is not None,
            task_set=source.path,
            tasks=tuple(task_names),
            task_digests=digests,
            parents=_parents(self._config),
        )
        return session, info

    def _show(self, summary: RunSummary) -> None:
        report = self._report(summary)
        if self._quiet:
            return
        with suppress(BrokenPipeError):  # for example, `| head` has ended
            if self._job is not None:
                render_job(summary, name=self._job, run_dir=self.run_dir.path, stream=sys.stdout)
            else:
                render_summary(summary, run_dir=self.run_dir.path, stream=sys.stdout)
            if report is not None and self._job is None:
                report.render(sys.stdout)
            sys.stdout.flush()
        if summary.broken:
            print_error(_broken_solutions(summary, self.run_dir))

    def _report(self, summary: RunSummary) -> ReplayReport | None:
        """Returns the policy's report on a replay, and writes it to `replay.json`; `None` for other runs."""
        report = self._components.policy.report(summary.results)
        if report is None:
            return None
        try:
            self.run_dir.write_json(self.run_dir.replay, report.to_dict())
        except OSError as error:
            level = logging.WARNING if summary.ended_by is None else logging.DEBUG
            logger.log(level, "Writing replay.json failed: %s", error)
        return report


def _broken_solutions(summary: RunSummary, run_dir: RunDir) -> str:
    broken = summary.broken
    tasks = list(dict.fromkeys(f"{one.task_name} ({one.reward:g})" for one in broken))
    episode_id = broken[0].episode_id
    look = f"`ares-exp show {shlex.quote(os.path.relpath(run_dir.path / episode_id))}`"
    if (run_dir.files / episode_id).is_dir():
        look += f", {os.path.relpath(run_dir.files / episode_id)}{os.sep}"
    return (
        f"The tasks' own solutions do not reach reward_threshold={summary.threshold:g} in {len(broken)} of "
        f"{len(summary.scored)} scored attempts: {first_of(tasks, SHOWN_TASKS)}. Either these tasks or "
        "their containers are broken, or the agent does not execute fenced bash blocks. To read the episodes: "
        f"{look}"
    )


def _parents(config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Returns the directories of the recorded runs that this run branches or replays."""
    named = [config[key] for key in _VERBS.values() if config[key] is not None]
    if not named:
        return ()
    return tuple(EpisodeRef.parse(name).run.path for name in named)


def _resolved(config: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, ())) from None
    return {str(key): value for key, value in values.items()}


def prepare_log() -> None:
    """Makes Hydra's log handlers mask secrets of the command line, and print repeated warnings only once."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(SecretFilter(typed_secrets(sys.argv[1:])))
        if type(handler) is logging.StreamHandler:
            handler.addFilter(RepeatedWarnings())
    logging.raiseExceptions = False  # a full disk is reported once, instead of one traceback per line


async def run_attended(run: Run) -> RunSummary:
    """Executes a run on the command line. The first Ctrl-C or SIGTERM ends the run, a second one exits immediately.

    SIGUSR1 requests a snapshot of every running episode.
    """
    presses = 0

    def on_signal() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            os._exit(130)  # containers are removed when this process ends
        run.interrupt()
        with suppress(OSError, ValueError):  # the reader of a pipe may have ended
            sys.stderr.write("\ninterrupted: running episodes are ending. Press Ctrl-C again to exit immediately\n")
            sys.stderr.flush()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # Ignored signals (nohup) are handled without effect, because containers would inherit the ignored state.
        ignored = number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN
        if ignored:
            loop.add_signal_handler(number, lambda: None)
        elif number is not signal.SIGQUIT:
            loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, run.request_snapshots)
    return await run.execute()
