"""One job: a composed config becomes a run directory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.config import instantiate_group, validate
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import UserError
from ares_exp.experiment import Components, Experiment, Settings
from ares_exp.hydra_records import scrub_hydra_records
from ares_exp.policies.policy import as_policy
from ares_exp.provenance import collect_provenance
from ares_exp.results import RunSummary
from ares_exp.run_dir import RunDir, write_atomically
from ares_exp.secrets import scrub
from ares_exp.summary import render_summary
from ares_exp.tasks.time_limits import TimeLimits
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_job(config: DictConfig) -> RunSummary:
    """Validates, prepares, runs, and prints the summary.

    Raises:
        UserError: Something is wrong; no container was started.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    run_dir = RunDir(Path(HydraConfig.get().runtime.output_dir))
    scrub_hydra_records(run_dir.path / ".hydra", list(HydraConfig.get().overrides.task))
    try:
        values: dict[str, Any] = OmegaConf.to_container(config, throw_on_missing=False)  # type: ignore[assignment]
        validate(values)
        components = build(config)
        resolved: dict[str, Any] = scrub(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
        summary = asyncio.run(_run(components, settings(values), run_dir, resolved))
    except UserError:
        run_dir.discard()
        raise
    render_summary(summary, run_dir=run_dir.path, stream=sys.stdout)
    return summary


def build(config: DictConfig) -> Components:
    """Makes every component; their constructors validate their arguments and touch nothing."""
    return Components(
        source=instantiate_group(config, "env"),
        agent_factory=instantiate_group(config, "agent"),
        container_factory=instantiate_group(config, "container"),
        policy=as_policy(instantiate_group(config, "policy")),
        wrapper=instantiate_group(config, "wrapper"),
        collector=instantiate_group(config, "collector"),
        tracker=instantiate_group(config, "tracker"),
    )


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
    )


async def _run(components: Components, chosen: Settings, run_dir: RunDir, config: Mapping[str, Any]) -> RunSummary:
    experiment = Experiment(components, chosen, run_dir)
    _install_signal_handlers(experiment)
    task_names = await experiment.prepare()
    provenance = await asyncio.to_thread(collect_provenance, task_set_path=components.source.path)
    run_dir.claim()
    _write_records(run_dir, config, {**provenance, "warnings": experiment.warnings, "tasks": list(task_names)})
    info = RunInfo(
        run_dir=run_dir.path,
        name=f"{config['name']}/{run_dir.path.name}",
        run_id=os.urandom(4).hex(),
        config=config,
        provenance=provenance,
        group=None,
        job_type=None,
        tags=(),
    )
    return await experiment.run(task_names, info)


def _write_records(run_dir: RunDir, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    write_atomically(run_dir.config, OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    run_dir.write_json(run_dir.provenance, provenance)


def _install_signal_handlers(experiment: Experiment) -> None:
    """The first Ctrl-C (or SIGTERM) ends running episodes and prints the summary; the second leaves at once."""
    loop = asyncio.get_running_loop()
    presses = 0

    def on_signal() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # the progress bar hides the cursor
            os._exit(130)  # containers hold on to this process: they go with it
        sys.stderr.write("\ninterrupted: ending running episodes; once more leaves at once\n")
        experiment.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
