"""The tasks of an environment as rows: index, name, and what is known of each before it is played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ares_exp.environments.source import Report, make_source
from ares_exp.hydra_setup import compose_config
from ares_exp.list.choices import Row


def task_rows(overrides: Sequence[str], report: Report, *, config_dirs: Sequence[Path] = ()) -> list[Row]:
    """What `env=… env.path=…` select, in order; the index is that of `env.tasks=5` among these.

    Args:
        overrides: As for a run.
        report: Is told of what is left out.
        config_dirs: Folders of options of the user's own.

    Raises:
        UserError: They do not compose, a value is missing or wrong, or the task set cannot be read.
    """
    source = make_source(compose_config(overrides, config_dirs=config_dirs))
    names = source.load(report)
    tasks = {task.name: task for task in getattr(source, "tasks", ()) if hasattr(task, "name")}
    return [{"index": index, "name": name, **_facts(tasks.get(name))} for index, name in enumerate(names)]


def _facts(task: Any) -> Row:
    """Stages with their limits, and image, of what is a `Task`; nothing of anything else."""
    stages, spec = getattr(task, "stages", None), getattr(task, "container_spec", None)
    if not stages or spec is None:
        return {}
    return {
        "stages": [
            {
                "name": stage.name,
                "agent_timeout_sec": stage.agent_timeout_sec,
                "verifier_timeout_sec": stage.verifier_timeout_sec,
            }
            for stage in stages
        ],
        "image": spec.docker_image or ("Dockerfile" if spec.context_dir is not None else None),
        "cpus": spec.cpus,
        "memory_mb": spec.memory_mb,
    }
