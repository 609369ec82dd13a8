"""Hydra's own records of a run (`.hydra/`), rid of secrets: Hydra writes them as they were typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ares_exp.run_dir import write_atomically
from ares_exp.secrets import MASK, scrub, typed_secrets


def scrub_hydra_records(folder: Path, overrides: Sequence[str]) -> None:
    """Masks secrets in the YAML files of `folder`, if there is one.

    Args:
        folder: The `.hydra` folder of a run.
        overrides: The command line's overrides; the values of those that look sensitive are masked wherever they stand.
    """
    from omegaconf import OmegaConf

    typed = typed_secrets(overrides)
    for path in sorted(folder.glob("*.yaml")):
        data = OmegaConf.to_container(OmegaConf.load(path))
        clean = scrub({"root": data})["root"]
        text = OmegaConf.to_yaml(OmegaConf.create(clean))
        for value in typed:
            text = text.replace(value, MASK)
        if clean != data or typed:
            write_atomically(path, text)
