import functools
import inspect
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain, suggest_key
from ares_exp.config.hydra_setup import compose_config, set_up_hydra
from ares_exp.config.options import conf_dir, find_options
from ares_exp.config.overrides import dotted_items, parse_overrides, with_home
from ares_exp.config.schema import GROUPS, KEYS, ExperimentConfig, keys, validate, value_of
from ares_exp.config.targets import (
    SCORER,
    added_defaults,
    arguments_of,
    constructor_defaults,
    instantiate_group,
    instantiate_several,
)
from ares_exp.errors import ConfigError
from ares_exp.records.results import RunSummary
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from ares_exp.trackers.tracker import NullTracker, RunInfo, SeveralTrackers
from ares_exp.trackers.wandb_tracker import WandbTracker

MODELS = "`policy=anthropic` or `policy=openai` or another option"


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
        ("policy.temprature", ["-m", "policy=openai,oracle", "seed=1,2"], " Did you mean `policy.temperature`?"),
        ("policy.modl", ["experiment=pass_at_k"], " Did you mean `policy.model`?"),
        ("policy.model", [], f" It is an argument of {MODELS}. Choose this option as well."),
        ("policy.modl", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("model", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("env.dataste", ["env=swebench"], " Did you mean `env.dataset`?"),
        ("env.matchs", ["env=nim"], " Did you mean `env.matches`?"),
        ("env.matches", ["env=harbor"], " It is an argument of `env=nim`, but not of `env=harbor`."),
        ("env.matches", [], " It is an argument of `env=nim`. Choose this option as well."),
        ("env.oracle.modl", ["env=twenty_questions", "policy@env.oracle=openai"], " Did you mean `env.oracle.model`?"),
        ("collector.jsn", ["collector=[json,jsonl]"], " Did you mean `collector.json`?"),
        ("collector.path", [], " Did you mean `collector.jsonl.path`, an argument of `collector=jsonl`?"),
        ("tracker.project", ["tracker=wandb"], " Did you mean `tracker.wandb.project`?"),
        ("agent.zzz", [], ""),
        ("zzz", ["budget=5", "nonsense", "env=gone"], ""),
    ],
)
def test_nearest_key_is_suggested(tmp_path: Path, word: str, argv: list[str], expected: str) -> None:
    assert suggest_key(word, argv, config_dirs=[tmp_path]) == expected


def test_unwritable_directory_is_named_with_the_remedy() -> None:
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
def test_home_directory_is_expanded(typed: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/my own/${x}")
    [override] = parse_overrides(with_home([typed]))
    assert override.value() == _in_home(value)


def test_home_is_expanded_for_each_sweep_job() -> None:
    [override] = parse_overrides(with_home(["env.path=~/a,~/b"]))
    assert [str(one).strip('"') for one in override.sweep_string_iterator()] == [f"{Path.home()}/a", f"{Path.home()}/b"]


def test_home_is_expanded_in_a_flag() -> None:
    assert with_home(["--config-dir=~/options"]) == [f"--config-dir={Path.home()}/options"]


@pytest.mark.parametrize("typed", ["~tracker", "~env.x=1", "x='~/y'", "x=a~/b", "x=~user/y", "--multirun"])
def test_other_tildes_are_unchanged(typed: str) -> None:
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


def test_defaults_are_valid() -> None:
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
def test_value_out_of_range_is_rejected(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        validate(config(**{key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["limits.steps", "limits.tokens", "limits.cost", "timeouts.agent", "timeouts.policy"])
def test_null_means_unlimited(key: str) -> None:
    validate(config(**{key: None}))


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="`attempts`"):
        validate(config(attemps=2))


MADE = [group for group in GROUPS if group != SCORER]
OPTIONS = [(group, path.stem) for group in MADE for path in sorted((conf_dir() / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


@functools.cache
def composed_round(number: int) -> Any:
    """Of every group the option of that number, or its last one: to compose takes as long for all groups as for one."""
    options = {group: [option for of, option in OPTIONS if of == group] for group in MADE}
    chosen = [f"{group}={names[min(number, len(names) - 1)]}" for group, names in options.items() if names]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=chosen)


def composed(group: str, option: str) -> Any:
    node = composed_round([name for of, name in OPTIONS if of == group].index(option))[group]
    return (
        node if "_target_" in node else node.get(option, node)
    )  # of some groups several options can be chosen: each has a node of its own


@pytest.mark.parametrize(
    ("option", "variable", "root", "path"),
    [
        ("openai", "OPENAI_BASE_URL", "http://127.0.0.1:8000/v1", ""),
        ("anthropic", "ANTHROPIC_BASE_URL", "http://127.0.0.1:8000", "/v1"),  # as the vendor's own clients read it
    ],
)
def test_endpoint_follows_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, option: str, variable: str, root: str, path: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    default = inspect.signature(get_object(composed("policy", option)._target_)).parameters["base_url"]
    assert composed("policy", option).base_url == default.default
    monkeypatch.setenv(variable, root)  # asked for when it is read
    assert composed("policy", option).base_url == root + path


@pytest.mark.parametrize(
    ("chosen", "container"),
    [
        (["env=terminal_bench"], "docker"),
        (["env=swebench"], "docker"),
        (["container=podman", "env=swebench"], "podman"),
        (["env=harbor"], "local"),
    ],
)
def test_image_data_sets_default_to_docker(chosen: list[str], container: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=chosen)
    assert config.container._target_ == composed("container", container)._target_


@pytest.mark.parametrize(
    ("chosen", "name"), [(["policy=anthropic", "policy.model=m-1"], "m-1"), (["policy=anthropic"], None), ([], None)]
)
@pytest.mark.parametrize("agent", ["claude_code", "codex", "opencode", "qwen_code"])
def test_packaged_agents_get_the_policys_model(agent: str, chosen: list[str], name: str | None) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert compose("config", overrides=[f"agent={agent}", *chosen]).agent.model_name == name


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_with_every_constructor_argument(group: str, option: str) -> None:
    node = composed(group, option)
    arguments = {str(key) for key in node if not str(key).startswith("_")}
    parameters = inspect.signature(get_object(node["_target_"])).parameters.values()
    named = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    assert arguments == (set() if node.get("_partial_") else named - {"clock"}) | set(added_defaults(group))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_file_contains_only_changed_defaults(group: str, option: str) -> None:
    settings = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
    defaults = constructor_defaults(composed(group, option)["_target_"])
    assert [key for key, value in settings.items() if key in defaults and value == defaults[key]] == []


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_argument_is_explained(group: str, option: str) -> None:
    [found] = [one for one in find_options(group) if one.name == option]
    arguments = arguments_of(found)
    assert [one.key for one in arguments if not one.prose] == []
    node = OmegaConf.to_container(composed(group, option), resolve=False)
    keys = [key for key, _ in dotted_items(node) if not key.startswith("_")]
    assert sorted(one.key.removeprefix(f"{group}.").removeprefix(f"{option}.") for one in arguments) == sorted(keys)


@pytest.mark.parametrize("group", [group for group in MADE if group != "policy"])
def test_option_of_wrong_type_is_refused(group: str) -> None:
    config = OmegaConf.create({group: {"_target_": "builtins.int"}})
    for make in (instantiate_group, instantiate_several):
        with pytest.raises(
            ConfigError, match=f"Expected the option of `{group}` to create .*, got int, which has no `"
        ):
            make(config, group)
    several = OmegaConf.create({group: {"one": {"_target_": "builtins.int"}}})
    with pytest.raises(ConfigError, match=f"Expected the option of `{group}` to create "):
        instantiate_several(several, group)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes(name: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=[f"experiment={name}"])
    assert set(config) == {*GROUPS, *KEYS}


@pytest.mark.parametrize(
    "path", sorted(conf_dir().glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_option_file_starts_with_its_description(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ")
    assert len(lines[0]) < 140
    assert not lines[0].endswith(".")


def test_every_key_has_description_and_typed_default() -> None:
    defaults = OmegaConf.structured(ExperimentConfig)
    for key in keys():
        assert key.prose
        assert value_of(defaults, key.name) == key.default


def test_wrong_value_names_its_key_without_types() -> None:
    config = OmegaConf.merge({"policy": composed("policy", "scripted")}, {"policy": {"replies": "hello"}})
    with pytest.raises(ConfigError, match=r"^`policy\.replies`: Input should be a valid list or "):
        instantiate_group(config, "policy")


def test_one_or_several_trackers_are_made() -> None:
    assert {name: type(one) for name, one in instantiate_several(compose_config([]), "tracker").items()} == {
        "wandb": WandbTracker
    }
    several = instantiate_several(compose_config(["tracker=[wandb,jsonl,tensorboard,none]"]), "tracker")
    assert {name: type(one) for name, one in several.items()} == {
        "wandb": WandbTracker,
        "jsonl": JsonlTracker,
        "tensorboard": TensorboardTracker,
        "none": NullTracker,
    }


def test_each_tracker_has_separate_arguments(tmp_path: Path) -> None:
    config = compose_config(
        [
            "tracker=[jsonl,tensorboard]",
            "tracker.jsonl.finish_timeout_sec=30",
            "tracker.tensorboard.finish_timeout_sec=40",
        ]
    )
    assert (config.tracker.jsonl.finish_timeout_sec, config.tracker.tensorboard.finish_timeout_sec) == (30, 40)
    trackers = SeveralTrackers(instantiate_several(config, "tracker"))
    trackers.start(RunInfo(run_dir=tmp_path / "env", name="n", run_id="i"))
    trackers.finish(RunSummary(0, ()))
    assert sorted(path.name for path in (tmp_path / "env").iterdir()) == ["metrics.jsonl", "nim.yaml", "tensorboard"]
    assert trackers.failures == 0


def test_wrong_argument_of_one_tracker_is_named() -> None:
    config = compose_config(["tracker=[wandb,jsonl]", "tracker.jsonl.finish_timeout_sec=-1"])
    with pytest.raises(ConfigError, match=r"tracker\.jsonl\.finish_timeout_sec"):
        instantiate_several(config, "tracker")
