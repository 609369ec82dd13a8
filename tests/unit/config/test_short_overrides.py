"""The name of the one option that is chosen may be left out of an override."""

from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.config.hydra_setup import set_up_hydra
from ares_exp.config.short_overrides import in_full

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["tracker.project=x"], ["tracker.wandb.project=x"]),
        (["++tracker.project=tracker.x"], ["++tracker.wandb.project=tracker.x"]),
        (["tracker.mode=offline,online"], ["tracker.wandb.mode=offline,online"]),
        (
            ["tracker=jsonl", "tracker.finish_timeout_sec=3"],
            ["tracker=jsonl", "tracker.jsonl.finish_timeout_sec=3"],
        ),
        (["experiment=smoke", "collector.output_dir=/x"], ["experiment=smoke", "collector.json.output_dir=/x"]),
        (
            ["collector=jsonl", "collector.path=/x", "tracker.project=x"],
            ["collector=jsonl", "collector.jsonl.path=/x", "tracker.wandb.project=x"],
        ),
        (["seed=1,2", "tracker.project=x"], ["seed=1,2", "tracker.wandb.project=x"]),
    ],
)
def test_the_name_is_put_in(typed: list[str], meant: list[str]) -> None:
    assert in_full(typed) == meant


@pytest.mark.parametrize(
    "typed",
    [
        ["tracker.wandb.project=x"],
        ["tracker=[wandb,jsonl]", "tracker.project=x"],
        ["tracker=wandb,none", "tracker.wandb.project=x"],
        ["tracker=none", "tracker.project=x"],
        ["tracker=no_such", "tracker.project=x"],
        ["tracker.no_such_key=x"],
        ["+tracker.mine={a: 1}"],
        ["tracker.project=[x"],
        ["policy.temperature=0", "seed=1"],
        [],
    ],
)
def test_everything_else_stays_as_it_is(typed: list[str]) -> None:
    assert in_full(typed) == typed


def test_an_option_of_the_users_own_without_a_node_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker" / "mine.yaml").write_text("_target_: mine.Tracker\nproject: x\n")
    typed = [f"hydra.searchpath=[file://{tmp_path}]", "tracker=mine", "tracker.project=y"]
    assert in_full(typed) == typed
