"""Whether a command is a run or a sweep, without a composition to find it out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hydra._internal.hydra import Hydra

from ares_exp.config.hydra_setup import is_decided_by_flags, mode_from_flags
from ares_exp.config.options import conf_dir


@pytest.mark.parametrize(
    "arguments",
    [[], ["-m", "seed=1,2"], ["hydra.run.dir=run", "hydra/launcher=joblib", "name=hydra.mode=RUN", "policy.model=x"]],
)
def test_flags_alone(arguments: list[str]) -> None:
    assert is_decided_by_flags(arguments)


@pytest.mark.parametrize(
    "argument",
    [
        "experiment=temperature_sweep",
        "+experiment@_global_=mine",
        "hydra.mode=MULTIRUN",
        "++hydra.mode=MULTIRUN",
        "hydra={mode:MULTIRUN}",
        "hydra.searchpath=[options]",
        "--config-dir=options",
        "-cd",
        "--config-name=mine",
    ],
)
def test_what_may_name_another_mode(argument: str) -> None:
    assert not is_decided_by_flags(["-m", argument, "env.limit=1"])
    before = Hydra.get_mode
    with mode_from_flags([argument]):
        assert Hydra.get_mode is before


def test_no_other_option_of_ours_names_a_mode() -> None:
    named = set()
    for path in conf_dir().rglob("*.yaml"):
        content: Any = yaml.safe_load(path.read_text()) or {}
        if "mode" in (content.get("hydra") or {}):
            named.add(path.parent.name)
    assert named == {"experiment"}


def test_hydra_is_as_it_was_afterwards() -> None:
    before = Hydra.get_mode
    with suppress(KeyboardInterrupt), mode_from_flags(["env.limit=1"]):
        assert Hydra.get_mode is not before
        raise KeyboardInterrupt
    assert Hydra.get_mode is before
