"""What `${…}` in `conf/config.yaml` stands for. Every process that composes a config registers these first."""

from __future__ import annotations

from pathlib import Path

from ares_exp.run_dir import RunDir, fresh_dir

HYDRA_RECORDS = ".hydra"


def register_resolvers() -> None:
    """Registers all with OmegaConf; more than once does no harm."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("fresh_dir", fresh_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("hydra_records", hydra_records, replace=True)


def hydra_records(resume: bool, run_dir: str | None) -> str | None:
    """The folder for Hydra's records of a run, or `None` where a resumed run has them: they stay as they were."""
    begun = resume and run_dir is not None and RunDir(Path(run_dir)).has_run
    return None if begun else HYDRA_RECORDS
