"""Presets of the config tree, of plugins and of scripts, and the selectors of tasks in their ids."""

from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp import EnvironmentInfo, JsonTrajectoryCollector, LLMResponse
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ConfigError, UnsupportedTaskError
from ares_exp.wrappers import registry
from ares_exp.wrappers.registry import (
    ConfiguredPreset,
    PresetId,
    info,
    list_presets,
    make,
    register_env,
    register_preset,
)
from tests.compatibility.case import write_task
from tests.installed_package import Site

SUBMIT = LLMResponse.from_text("```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```")
TAKE_3 = LLMResponse.from_text("3")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


class CountingSpec:
    """A spec that knows nothing of collectors."""

    def get_info(self) -> EnvironmentInfo:
        return EnvironmentInfo("counting", "Counts", 10)

    def get_env(self, *, selector: Any, container_factory: Any, tracker: Any = None) -> Any:
        self.asked = (selector([*range(10)]), container_factory, tracker)
        return self

    async def close(self) -> None:
        """Holds nothing."""


def test_options_of_env_are_presets() -> None:
    assert {"harbor", "swebench"} <= {*list_presets()}
    assert "harbor-shell" not in list_presets()
    samples = info("harbor")
    assert (samples.name, samples.num_tasks) == ("harbor", 6)
    assert samples.description.startswith("Harbor")
    assert str(samples) == f"harbor (6 tasks): {samples.description}"
    assert samples in info()
    assert info("harbor-shell").description.endswith("; agent shell")


@pytest.mark.parametrize(
    ("preset_id", "expected"),
    [
        ("harbor:5", ["write-greeting"]),
        ("harbor-shell:0:2", ["access-log-report", "count-records"]),
        ("harbor@1/3", ["fix-moving-average", "monthly-revenue"]),
    ],
)
def test_made_environment_has_the_selected_tasks(preset_id: str, expected: list[str]) -> None:
    assert [*make(preset_id).task_names] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("preset_id", "kind", "message"),
    [
        ("harbr", LookupError, "Did you mean `harbor`"),
        ("harbor-shel", LookupError, "no agent `shel`. Did you mean `shell`"),
        ("nothing_like_it", LookupError, "Presets: .*harbor"),
        ("harbor:x", ValueError, "got 'harbor:x'"),
        (5, ValueError, "got 5"),
        ("x" * 9000, LookupError, r"^.{,600}$"),
    ],
)
def test_invalid_preset_ids_are_refused(preset_id: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        make(preset_id)
    assert isinstance(caught.value, ConfigError)


def test_registered_spec_receives_the_arguments() -> None:
    spec, factory, tracker = CountingSpec(), DockerContainerFactory(), object()
    register_preset("my-counting", spec)
    assert "my-counting" in list_presets()
    assert info("my-counting:3") == EnvironmentInfo("my-counting", "Counts", 10), "the name that make() takes"
    assert info("my-counting") in info()
    assert make("my-counting:2:4", container_factory=factory, tracker=tracker) is spec  # type: ignore[arg-type]
    assert spec.asked == ([2, 3], factory, tracker)
    make("my-counting")
    assert isinstance(spec.asked[1], LocalContainerFactory)


def test_function_can_be_a_preset() -> None:
    @register_env(name="halves", description="Half of it", num_tasks=4)
    def make_halves(*, selector: Any, container_factory: Any, tracker: Any = None) -> Any:
        return selector([*"abcd"])

    @register_env()
    def thirds(**_: Any) -> Any:
        """A third of it.

        And more.
        """

    assert make("halves@1/2") == ["c", "d"]
    assert info("halves") == EnvironmentInfo("halves", "Half of it", 4)
    assert info("thirds") == EnvironmentInfo("thirds", "A third of it.", None)
    assert str(info("thirds")) == "thirds (an unknown number of tasks): A third of it."
    assert make_halves(selector=len, container_factory=None) == 4


@pytest.mark.parametrize("name", ["a:b", "a@b", "", " ", " a", 3, "twice", "harbor", "harbor-shell"])
def test_invalid_names_are_refused(name: Any) -> None:
    register_preset("twice", CountingSpec())
    with pytest.raises(ValueError, match="preset") as caught:
        register_preset(name, CountingSpec())
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("spec", "got"), [(object(), "got object"), (CountingSpec, "got the class CountingSpec"), (len, "register_env")]
)
def test_invalid_specs_are_refused(spec: Any, got: str) -> None:
    with pytest.raises(ValueError, match=got):
        register_preset("mine", spec)
    assert "mine" not in list_presets()


def test_missing_mandatory_value_is_requested(site: Site) -> None:
    env = "# Wants much\n_target_: ares_exp.environments.harbor.HarborEnvironments\npath: ???\nlimit: ???\n"
    site.install("wanting", {"wanting": "wanting.conf"}, {"wanting/conf/env/wanting.yaml": env})
    assert info("wanting") == EnvironmentInfo("wanting", "Wants much", None)
    with pytest.raises(ValueError, match=r"needs a value for `env\.limit` and `env\.path`") as caught:
        make("wanting")
    assert 'ConfiguredPreset("wanting", overrides=("env.limit=…", "env.path=…",))' in str(caught.value)
    register_preset("mine", ConfiguredPreset("wanting", overrides=("env.limit=2", "env.path=null")))
    assert (info("mine").name, info("mine").num_tasks) == ("mine", 2)
    assert len(make("mine").task_names) == 2  # type: ignore[attr-defined]


def test_preset_with_wrong_options_is_reported(site: Site) -> None:
    env = "_target_: ares_exp.environments.harbor.HarborEnvironments\nlimitt: 1\n"
    site.install("wrong", {"wrong": "wrong.conf"}, {"wrong/conf/env/wrong.yaml": env, "wrong/conf/env/a-b.yaml": env})
    assert "wrong" in list_presets()
    assert "a-b" not in list_presets(), "it could not be told from a pair"
    with pytest.raises(LookupError, match="`env=a-b` is not a preset"):
        make("a-b:0")
    with pytest.raises(ConfigError, match="`env` has no argument `limitt`"):
        make("wrong")


def test_unusable_class_is_reported_once_in_one_line(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    options = {"raising": "_target_: raising.Source\n", "foreign": "_target_: builtins.dict\n"}
    files = {f"raising/conf/env/{name}.yaml": text for name, text in options.items()}
    files["raising/__init__.py"] = "raise RuntimeError('no luck')\n"
    site.install("raising", {"raising": "raising.conf"}, files)
    with pytest.raises(ConfigError, match=r"^`env` cannot be created: .*no luck.*$"):
        make("raising")
    with pytest.raises(ConfigError, match="an environment source, got dict, which has no `path`, `load`"):
        make("foreign")
    assert info("raising").num_tasks is None
    assert caplog.records == []


@pytest.mark.usefixtures("nim")
async def test_plugin_preset_is_run_and_collected(tmp_path: Path) -> None:
    collector = JsonTrajectoryCollector(tmp_path)
    async with make("nim:0", trajectory_collector=collector) as env:
        await env.reset()
        last = await env.step(TAKE_3)
    assert (last.step_type, last.reward) == ("LAST", 1.0)
    [path] = tmp_path.glob("*.json")
    assert ares_exp.EpisodeTrajectory.load(path).task_name == "nim_3"


@pytest.mark.local
async def test_unsupported_task_does_not_affect_others(tmp_path: Path) -> None:
    for name, toml in (("fine", ""), ("foreign", '[environment]\nos = "windows"\n')):
        write_task(tmp_path / name, {"task.toml": toml, "tests/test.bat": ""})
    register_preset("mine", ConfiguredPreset("harbor", overrides=(f"env.path={tmp_path}",)))
    async with make("mine:0") as env:
        await env.reset()
        assert (await env.step(SUBMIT)).reward == 1.0
    async with make("mine") as env:
        with pytest.raises(UnsupportedTaskError, match="foreign"):
            await env.reset()


def test_repository_tasks_are_not_fetched_for_counting() -> None:
    assert ConfiguredPreset("harbor", overrides=("env.repo=nobody/nothing",)).get_info().num_tasks is None


TASKS = [*"abcdefghij"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p", "abcdefghij"),
        ("p:0", "a"),
        ("p:9", "j"),
        ("p:0:3", "abc"),
        ("p:8:", "ij"),
        ("p::2", "ab"),
        ("p::", "abcdefghij"),
        ("p:8:99", "ij"),
        ("p@0/1", "abcdefghij"),
        ("p@3/8", "de"),
        ("a.b-c:1", "b"),
    ],
)
def test_selector_chooses_tasks(text: str, expected: str) -> None:
    asked = PresetId.parse(text)
    assert asked(TASKS) == [*expected]
    assert str(asked) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1", "p:", "p:a", "p:-1", "p:0:1:2", "p:0:-1", "p:1.0", "p:١", "p:" + 5000 * "9"),
        *("@0/2", "p@", "p@1", "p@/2", "p@2/2", "p@0/0", "p@0/2:1", "p:1@0/2"),
    ],
)
def test_invalid_syntax_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="xpected") as caught:
        PresetId.parse(text)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("text", ["p:10", "p:10:", "p:3:3", "p:5:2", "p@0/11"])
def test_empty_selection_is_a_lookup_error(text: str) -> None:
    with pytest.raises(LookupError, match=text) as caught:
        PresetId.parse(text)(TASKS)
    assert isinstance(caught.value, ConfigError)


def test_preset_without_tasks_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="no tasks"):
        PresetId.parse("p")([])
