"""Classes that moved: recorded configs and users' own options that name their old places."""

from __future__ import annotations

from hydra.utils import get_object
from omegaconf import OmegaConf

from ares_exp.config.instantiate import instantiate_group
from ares_exp.config.moved_targets import MOVED_TARGETS, with_moved_targets
from ares_exp.running.retries import RetryRules


def test_every_class_is_where_the_table_says() -> None:
    for name in MOVED_TARGETS.values():
        assert get_object(name).__name__ == name.rpartition(".")[2]
        assert name not in MOVED_TARGETS, "each is mapped at once"


def test_an_option_of_the_users_own_may_name_an_old_place() -> None:
    node = {"_target_": "ares_exp.retries.RetryRules", "container_error": "${attempts}"}
    config = OmegaConf.create({"retry": node, "attempts": 2})
    OmegaConf.set_struct(config, True)
    assert isinstance(instantiate_group(config, "retry"), RetryRules)
    assert config.retry.container_error == 2


def test_classes_are_renamed_at_any_depth_and_nothing_else_is() -> None:
    old, new = "ares_exp.budget.Budget", "ares_exp.running.budget.Budget"
    config = {"_target_": old, "name": old, "parts": [{"_target_": old}, {"_target_": "mine.Part"}]}
    expected = {"_target_": new, "name": old, "parts": [{"_target_": new}, {"_target_": "mine.Part"}]}
    assert with_moved_targets(config) == expected
    assert config["_target_"] == old
