"""One job: a composed config becomes a run directory."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ares_exp.branching import Branching, BranchOptions
from ares_exp.components import Components, Settings
from ares_exp.config import instantiate_group, instantiate_several, validate
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import make_source
from ares_exp.episode_ref import EpisodeRef
from ares_exp.errors import ConfigError, UserError
from ares_exp.experiment import Experiment
from ares_exp.hydra_records import scrub_hydra_records
from ares_exp.policies.policy import RunReport, as_policy
from ares_exp.provenance import collect_provenance
from ares_exp.results import EpisodeResult
from ares_exp.resumed_config import restore
from ares_exp.run_dir import RunDir
from ares_exp.run_summary import RunSummary
from ares_exp.secrets import SecretFilter, scrub, scrub_argv, typed_secrets
from ares_exp.session import close_session, open_session, task_digests
from ares_exp.summary import render_summary
from ares_exp.tasks.time_limits import TimeLimits
from ares_exp.trackers.several import SeveralTrackers
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)


def run_job(config: DictConfig) -> RunSummary:
    """Validates, prepares, runs, and prints the summary.

    Raises:
        UserError: Something is wrong; no container was started.
        KeyboardInterrupt: Ctrl-C before the first episode.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    hydra = HydraConfig.get()
    run_dir, sweeps = RunDir(Path(hydra.runtime.output_dir)), hydra.mode == RunMode.MULTIRUN
    for handler in logging.getLogger().handlers:
        handler.addFilter(SecretFilter(typed_secrets(sys.argv[1:])))
    overrides = cast("list[str]", OmegaConf.to_container(hydra.overrides.task, resolve=False))
    scrub_hydra_records(run_dir.path / ".hydra", overrides)
    logging.raiseExceptions = False  # a full disk is reported once, not as a traceback for each line
    if sweeps:
        sys.stdout.write(f"\n#{hydra.job.num}: {' '.join(scrub_argv(overrides))}\n")
    try:
        if config.resume and run_dir.has_run and (changed := restore(config, run_dir, overrides)):
            logger.warning("What is on disk of %s has changed; the run goes on as it was.", ", ".join(changed))
        values = _resolved(config)
        validate(values)
        chosen = replace(settings(values), sweep_dir=Path(hydra.sweep.dir) if sweeps else None)
        job = _Job(build(config), chosen, run_dir, scrub(values))
        job.group = f"{values['name']}/{Path(hydra.sweep.dir).name}" if sweeps else None
        return asyncio.run(job.run())
    except UserError:
        if not sweeps:  # Hydra goes on writing in the folders of a sweep
            run_dir.discard()
        raise


def _resolved(config: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"`{error.full_key}`: {str(error).splitlines()[0]}") from None
    return {str(key): value for key, value in cast("dict[Any, Any]", values).items()}


def build(config: DictConfig) -> Components:
    """Makes every component; their constructors validate their arguments and touch nothing."""
    return Components(
        source=make_source(config),
        agent_factory=instantiate_group(config, "agent"),
        container_factory=instantiate_group(config, "container"),
        policy=as_policy(instantiate_group(config, "policy")),
        wrapper=instantiate_group(config, "wrapper"),
        collectors=instantiate_several(config, "collector"),
        tracker=SeveralTrackers(instantiate_several(config, "tracker")),
        snapshots=instantiate_group(config, "snapshot"),
        branching=_branching(config),
        retry=instantiate_group(config, "retry"),
        budget=instantiate_group(config, "budget"),
    )


def _branching(config: DictConfig) -> Branching | None:
    if config.branch_from is None:
        return None
    options = BranchOptions(inject=config.branch_inject, edit=config.branch_edit, answer=config.branch_answer)
    return Branching(config.branch_from, options)


def settings(values: Mapping[str, Any]) -> Settings:
    """The experiment's own settings out of the root config."""
    time_limits = TimeLimits(
        timeout_multiplier=values["timeout_multiplier"],
        agent_timeout_sec=values["agent_timeout_sec"],
        agent_timeout_max_sec=values["agent_timeout_max_sec"],
        agent_timeout_multiplier=values["agent_timeout_multiplier"],
        verifier_timeout_sec=values["verifier_timeout_sec"],
        verifier_timeout_max_sec=values["verifier_timeout_max_sec"],
        verifier_timeout_multiplier=values["verifier_timeout_multiplier"],
        environment_build_timeout_multiplier=values["environment_build_timeout_multiplier"],
    )
    limits = EpisodeLimits(
        steps=values["step_limit"],
        tokens=values["token_limit"],
        cost=values["cost_limit"],
        time=time_limits,
        verify_on_truncation=values["verify_on_truncation"],
    )
    return Settings(
        attempts=values["attempts"],
        concurrency=values["concurrency"],
        seed=values["seed"],
        limits=limits,
        policy_timeout_sec=values["policy_timeout_sec"],
        resume_diverged=values["resume_diverged"],
        monitor_interval_sec=values["monitor_interval_sec"],
        stall_warn_sec=values["stall_warn_sec"],
        reward_threshold=values["reward_threshold"],
    )


class _Job:
    """One run on its event loop: signals, records, episodes, summary."""

    def __init__(self, components: Components, chosen: Settings, run_dir: RunDir, config: Mapping[str, Any]) -> None:
        self.group: str | None = None
        self._components = components
        self._experiment = Experiment(components, chosen, run_dir)
        self._run_dir = run_dir
        self._config = config
        self._presses = 0

    async def run(self) -> RunSummary:
        loop = asyncio.get_running_loop()
        preparing = asyncio.ensure_future(self._experiment.prepare())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # What is ignored (nohup) stays without effect, but by a handler: boxes would inherit the ignoring.
            ignored = number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN
            if ignored:
                loop.add_signal_handler(number, lambda: None)
            elif number is not signal.SIGQUIT:
                loop.add_signal_handler(number, self._on_signal, preparing)
        loop.add_signal_handler(signal.SIGUSR1, self._experiment.request_snapshots)
        summary = None
        try:
            summary = await self._play(await preparing)
        except asyncio.CancelledError:
            if not self._presses:
                raise
            raise KeyboardInterrupt from None
        finally:
            await self._experiment.close(summary)
        return summary

    async def _play(self, task_names: Sequence[str]) -> RunSummary:
        source = self._components.source
        origins = getattr(source, "origins", None)
        provenance = await asyncio.to_thread(collect_provenance, task_set_path=source.path, task_origins=origins)
        digests = await asyncio.to_thread(task_digests, source, task_names)
        recorded_usage = getattr(source, "recorded_usage", lambda files: None)
        with self._run_dir.owned(resume=self._config["resume"]):
            warnings = self._experiment.warnings
            try:
                session = await asyncio.to_thread(
                    open_session, self._run_dir, self._config, provenance, digests, warnings, recorded_usage
                )
            except OSError as error:
                raise ConfigError(f"Cannot write in the run directory {self._run_dir.path}: {error}.") from error
            info = RunInfo(
                run_dir=self._run_dir.path,
                name=f"{self._config['name']}/{self._run_dir.path.name}",
                run_id=session.run_id,
                config=self._config,
                provenance=provenance,
                group=self.group,
                resumed=session.earlier is not None,
                task_set=source.path,
                tasks=tuple(task_names),
                task_digests=digests,
                parents=_parents(self._config),
            )
            redo = self._config["resume_redo"] or ()
            summary = await self._experiment.run(task_names, info, earlier=session.earlier, redo=redo)
            close_session(self._run_dir, summary)
        report = self._report(summary)
        with suppress(BrokenPipeError):  # `| head` has seen enough
            render_summary(summary, run_dir=self._run_dir.path, stream=sys.stdout)
            if report is not None:
                report.render(sys.stdout)
        return summary

    def _report(self, summary: RunSummary) -> RunReport | None:
        """What the policy has to say of the run, if it is one of those that do; also written to `replay.json`."""
        make: Callable[[Sequence[EpisodeResult]], RunReport] | None = getattr(self._components.policy, "report", None)
        if make is None:
            return None
        report = make(summary.results)
        try:
            self._run_dir.write_json(self._run_dir.replay, report.to_dict())
        except OSError as error:
            logger.warning("Writing replay.json failed: %s", error)
        return report

    def _on_signal(self, preparing: asyncio.Future[Sequence[str]]) -> None:
        """The first Ctrl-C (or SIGTERM) ends running episodes and prints the summary; the second leaves at once."""
        self._presses += 1
        if self._presses > 1:
            os._exit(130)  # containers hold on to this process: they go with it
        preparing.cancel()
        self._experiment.interrupt()
        with suppress(OSError, ValueError):  # nobody may be reading any more
            sys.stderr.write("\ninterrupted: ending running episodes; once more leaves at once\n")
            sys.stderr.flush()


def _parents(config: Mapping[str, Any]) -> tuple[Path, ...]:
    """The runs that this one was made from."""
    named = [config[verb] for verb in ("branch_from", "replay") if config[verb] is not None]
    return tuple(EpisodeRef.parse(name).run.path for name in named)
