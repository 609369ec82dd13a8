"""Command lines: known keys, overrides, run modes, and messages for mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain, suggest_key
from ares_exp.config.hydra_setup import is_decided_by_flags, mode_from_flags, set_up_hydra
from ares_exp.config.options import conf_dir
from ares_exp.config.overrides import parse_overrides, with_home
from ares_exp.config.schema import ExperimentConfig, validate
from ares_exp.errors import ConfigError

MODELS = "`policy=anthropic` or `policy=openai` or another one"


@pytest.fixture(autouse=True)
def _options(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "nim.yaml").write_text("# a game\n_target_: nowhere.Nim\nmatches: [3]\n")
    set_up_hydra([tmp_path])
    yield
    set_up_hydra([])


@pytest.mark.parametrize(
    ("word", "argv", "expected"),
    [
        ("atempts", [], " Did you mean `attempts`?"),
        ("env.attempts", [], " Did you mean `attempts`?"),
        ("policy.temprature", ["policy=openai"], " Did you mean `policy.temperature`?"),
        (
            "policy.temprature",
            ["-m", "policy=openai,oracle", "seed=1,2"],
            " Did you mean `policy.temperature`?",
        ),
        ("policy.modl", ["experiment=pass_at_k"], " Did you mean `policy.model`?"),
        ("policy.model", [], f" It is an argument of {MODELS}: choose that option, too."),
        ("policy.modl", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("model", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("env.dataste", ["env=swebench"], " Did you mean `env.dataset`?"),
        ("env.matchs", ["env=nim"], " Did you mean `env.matches`?"),
        ("env.matches", ["env=harbor"], " It is an argument of `env=nim`; `env=harbor` does not take it."),
        ("env.matches", [], " It is an argument of `env=nim`: choose that option, too."),
        (
            "env.oracle.modl",
            ["env=twenty_questions", "policy@env.oracle=openai"],
            " Did you mean `env.oracle.model`?",
        ),
        ("collector.jsn", ["collector=[json,jsonl]"], " Did you mean `collector.json`?"),
        ("collector.path", [], " Did you mean `collector.jsonl.path`, an argument of `collector=jsonl`?"),
        ("tracker.project", ["tracker=wandb"], " Did you mean `tracker.wandb.project`?"),
        ("agent.zzz", [], ""),
        ("zzz", ["budget=5", "nonsense", "env=gone"], ""),
    ],
)
def test_the_nearest_key_is_named(word: str, argv: list[str], expected: str) -> None:
    assert suggest_key(word, argv) == expected


def test_a_place_that_cannot_be_written_is_named_with_the_remedy() -> None:
    def refuse() -> str:
        raise PermissionError(13, "Permission denied", "outputs")

    OmegaConf.register_new_resolver("refuse", refuse, replace=True)
    try:
        with pytest.raises(OmegaConfBaseException) as caught:
            _ = OmegaConf.create({"place": {"dir": "${inner}"}, "inner": "${refuse:}"}).place.dir
    finally:
        OmegaConf.clear_resolver("refuse")
    said = explain(caught.value, [])
    assert said.startswith("Cannot use outputs: Permission denied.")
    assert "hydra.run.dir=…" in said
    said = explain(OSError(28, "No space left on device"), ["seed=1", "hydra.run.dir=small/r"])
    assert said.startswith("Cannot write a run to small/r: No space left on device. Choose another place")


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("env.path=~/tasks", "HOME/tasks"),
        ("env.path=~", "HOME"),
        ("a=[~/b,c,~]", ["HOME/b", "c", "HOME"]),
        ("env.path=/a", "/a"),
    ],
)
def test_the_home_folder_is_put_in(typed: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/my own/${x}")
    [override] = parse_overrides(with_home([typed]))
    assert override.value() == _in_home(value)


def test_it_is_put_in_for_each_job_of_a_sweep() -> None:
    [override] = parse_overrides(with_home(["env.path=~/a,~/b"]))
    assert [str(one).strip('"') for one in override.sweep_string_iterator()] == [f"{Path.home()}/a", f"{Path.home()}/b"]


def test_it_is_put_in_a_flag() -> None:
    assert with_home(["--config-dir=~/options"]) == [f"--config-dir={Path.home()}/options"]


@pytest.mark.parametrize("typed", ["~tracker", "~env.x=1", "x='~/y'", "x=a~/b", "x=~user/y", "--multirun"])
def test_everything_else_stays(typed: str) -> None:
    assert with_home([typed]) == [typed]


def _in_home(value: object) -> object:
    if isinstance(value, list):
        return [_in_home(one) for one in value]
    return str(value).replace("HOME", "/home/my own/\\${x}")


def config(**changes: Any) -> dict[str, Any]:
    values = {**asdict(ExperimentConfig()), "budget": {}, "retry": {}}
    for key, value in changes.items():
        node, _, name = key.rpartition(".")
        (values[node] if node else values)[name] = value
    return values


def test_the_defaults_are_valid() -> None:
    validate(config())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attempts", 0, "at least 1"),
        ("concurrency", -3, "at least 1"),
        ("seed", -1, "at least 0"),
        ("limits.cost", 0.0, "above 0"),
        ("timeouts.multiplier", -1.0, "above 0"),
        ("timeouts.multiplier", float("inf"), "above 0"),
        ("timeouts.multiplier", float("nan"), "above 0"),
        ("timeouts.policy", 0.0, "above 0"),
        ("reward_threshold", float("nan"), "a finite number, got nan"),
        ("budget", 5, "Set `budget.KEY=…`"),
        ("resume_redo", ["lost", "policy_eror"], "got 'policy_eror'. Did you mean `policy_error`"),
        ("name", "", "folder name"),
        ("name", "..", "folder name"),
        ("name", "a/b", "folder name"),
    ],
)
def test_a_value_out_of_range(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        validate(config(**{key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["limits.steps", "limits.tokens", "limits.cost", "timeouts.agent", "timeouts.policy"])
def test_null_is_no_limit(key: str) -> None:
    validate(config(**{key: None}))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="`attempts`"):
        validate(config(attemps=2))


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
