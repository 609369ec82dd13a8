"""The tasks of an environment as rows: index, name, and the facts known before a task is played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ares_exp.config.hydra_setup import compose_config
from ares_exp.environments.source import Report, make_source
from ares_exp.listing.choices import Row
from ares_exp.tasks.task import Task


def task_rows(overrides: Sequence[str], report: Report, *, config_dirs: Sequence[Path] = ()) -> list[Row]:
    """Lists the tasks that `env=… env.path=…` select, in order; the index is that of `env.tasks=5` among these.

    Args:
        overrides: As for a run.
        report: Called with a sentence about tasks that are left out.
        config_dirs: The user's folders of options.

    Raises:
        UserError: They do not compose, a value is missing or wrong, or the task set cannot be read.
    """
    source = make_source(compose_config(overrides, config_dirs=config_dirs))
    names = source.load(report)
    facts = {task.name: _facts(task) for task in source.tasks}
    return [{"index": index, "name": name, **facts.get(name, {})} for index, name in enumerate(names)]


def _facts(task: Task) -> Row:
    """Stages with their limits, and image."""
    spec = task.container_spec
    return {
        "stages": [
            {
                "name": stage.name,
                "agent_timeout_sec": stage.agent_timeout_sec,
                "verifier_timeout_sec": stage.verifier_timeout_sec,
            }
            for stage in task.stages
        ],
        "image": spec.docker_image or ("Dockerfile" if spec.context_dir is not None else None),
        "cpus": spec.cpus,
        "memory_mb": spec.memory_mb,
    }
