import functools
import importlib.metadata
import json
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import ares_exp.gym
from ares_exp import LocalContainerFactory, ShellAgentFactory
from ares_exp.errors import ConfigError, EpisodeStateError, TaskError
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trajectories.collectors import NullTrajectoryCollector
from ares_exp.wrappers import PresetGym
from ares_exp.wrappers.sync_gym import GymWrapper

ID = "ares_exp/Harbor-v0"
PATH = str(SAMPLES / "write-greeting")


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_gymnasium_finds_the_ids_without_an_import():
    said = run(
        "import sys, gymnasium\n"
        "assert not [name for name in sys.modules if name.startswith('ares_exp')]\n"
        f"env = gymnasium.make('ares_exp.gym:{ID}', path={PATH!r})\n"
        "print(env.spec.id, type(env.unwrapped).__name__, len(env.unwrapped.environment.task_names))\n"
        "env.close()"
    )
    assert said == f"{ID} PresetGym 1"


def test_registering_imports_neither_tasks_nor_containers():
    said = run("import sys, ares_exp.gym; print([n for n in sys.modules if n.startswith('ares_exp.')])")
    assert said == "['ares_exp.gym']"


def test_wrappers_module_does_not_import_gymnasium():
    run(
        "import sys, ares_exp, ares_exp.wrappers\n"
        "from ares_exp.wrappers import AsyncGymWrapper, wrap_as_gym\n"
        "assert not {'gymnasium', 'numpy'} & set(sys.modules)"
    )


def test_exported_names_resolve():
    names = {
        *("AsyncGymWrapper", "EpisodeInfo", "GymWrapper", "PresetGym", "TextAction", "TextObservation"),
        "wrap_as_gym",
    }
    assert set(ares_exp.wrappers.__all__) == names
    assert all(getattr(ares_exp.wrappers, name).__doc__ for name in names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it has: AsyncGymWrapper"):
        ares_exp.wrappers.nothing  # noqa: B018


def test_entry_point_registers_the_ids():
    [found] = [p for p in importlib.metadata.entry_points(group="gymnasium.envs") if p.name == "ares_exp"]
    del gymnasium.registry[ID]
    register = found.load()
    register()
    register()  # again is no mistake, and no warning
    assert gymnasium.spec(ID).kwargs == {"preset": "harbor"}


@pytest.mark.parametrize(
    ("id_", "arguments"),
    [("ares_exp/TwentyQuestions-v0", {"questions": 3}), ("ares_exp/Preset-v0", {"preset": "twenty_questions:3:5"})],
)
def test_gymnasium_checks_pass_without_containers(id_, arguments):
    env = gymnasium.make(id_, **arguments)
    check_env(env.unwrapped)
    env.close()


def test_step_rejects_an_invalid_response():
    env = gymnasium.make("ares_exp/TwentyQuestions-v0", tasks="cat", questions=2)
    env.reset()
    with pytest.raises(TypeError, match=r"Expected an LLMResponse as the action, got None\. Use"):
        env.unwrapped.step(None)
    env.close()


@pytest.mark.parametrize(
    ("id_", "arguments", "said"),
    [
        ("SWEBench-v0", {"dataset": "x.y"}, "Expected `dataset` to be verified"),
        ("TwentyQuestions-v0", {"questions": 0}, r"`questions`: .*greater than or equal to 1 \(got 0\)"),
        ("Preset-v0", {}, r"`preset`: Missing required keyword only argument\.$"),
        ("Preset-v0", {"preset": "ares"}, "needs a value for `env.preset`"),
        ("Preset-v0", {"preset": "harbr"}, "Did you mean `harbor`"),
        ("Preset-v0", {"preset": "twenty_questions:x"}, "Expected a preset `name`"),
    ],
)
def test_wrong_argument_of_another_id_is_named(id_, arguments, said):
    with pytest.raises(ConfigError, match=said):
        gymnasium.make(f"ares_exp/{id_}", **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step_limit": 0}, r"`step_limit`: .*greater than or equal to 1 \(got 0\)"),
        ({"cost_limit": "much"}, r"`cost_limit`: .*valid number.* \(got 'much'\)"),
        ({"container": "lxc"}, "`container`: expected 'daytona', 'docker', .* or a container factory, got 'lxc'"),
        ({"agent": "json"}, "`agent`: expected 'aider', .* or a factory of agents, got 'json'"),
        ({"collector": "json"}, r"`collector`: .*TrajectoryCollector \(got 'json'\)"),
        ({"seed": "x"}, "`seed`"),
        ({"pth": PATH}, r"there is no argument `pth`\. Did you mean `path`"),
        ({"step_limit": 0, "token_limit": 0}, "`step_limit`.*; `token_limit`"),
        ({"tasks": "no-such"}, "no-such"),
        ({"exclude": "*"}, "excludes all 6 selected tasks"),
        ({"trajectory_dir": "x", "collector": NullTrajectoryCollector()}, "got both"),
        ({"path": "/no/such"}, r"/no/such: no such directory\. Set path=<directory>"),
        ({"render_mode": "human"}, r"`render_mode`: .*'ansi' \(got 'human'\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode='human'")
def test_wrong_argument_is_named_in_one_paragraph(arguments, said):
    with pytest.raises((ConfigError, TaskError), match=said) as caught:
        gymnasium.make(ID, **arguments)
    assert "\n" not in str(caught.value)


def test_arguments_reach_the_environment():
    env = PresetGym(
        preset="harbor",
        path=SAMPLES,
        tasks=["write-*", "count-*"],
        exclude="count-*",
        container=LocalContainerFactory(pids_limit=64),
        agent=ShellAgentFactory(max_output_chars=100),
        step_limit=3,
        token_limit=4,
        cost_limit=0.5,
        agent_timeout_sec=7,
        verify_on_truncation=False,
        collector=NullTrajectoryCollector(),
    )
    choosing = env.environment._env
    assert choosing.task_names == ("write-greeting",)
    limits = choosing._parts.limits
    assert (limits.steps, limits.tokens, limits.cost, limits.verify_on_truncation) == (3, 4, 0.5, False)
    assert limits.time.agent_timeout_sec == 7
    assert choosing._parts.container_factory._pids_limit == 64
    assert choosing._parts.code_agent_factory.max_output_chars == 100
    env.close()


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_factory_can_be_pickled(pickler):
    factory = functools.partial(
        PresetGym, preset="harbor", path=Path(PATH), container=LocalContainerFactory(), step_limit=3
    )
    env = pickle.loads(pickler.dumps(factory))()
    assert isinstance(env, GymWrapper)
    env.close()


def test_spec_round_trips_through_json():
    env = gymnasium.make(ID, path=PATH, step_limit=3)
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert json.loads(env.spec.to_json())["kwargs"] == {"preset": "harbor", "path": PATH, "step_limit": 3}
    assert again.unwrapped.environment._parts.limits.steps == 3
    env.close()
    again.close()


@pytest.mark.usefixtures("nim")
def test_plugin_source_obeys_the_step_limit(tmp_path):
    with PresetGym(preset="nim", matches=[7], step_limit=2, trajectory_dir=tmp_path) as gym:
        gym.reset(seed=1, options={"task": "nim_7"})
        assert gym.step(LLMResponse.from_text("1"))[1:4] == (0.0, False, False)
        observation, *rest, info = gym.step(LLMResponse.from_text("1"))
        assert rest == [0.0, False, True]
        assert observation.messages[0]["content"] == "There are 3 matches. Take 1, 2 or 3."
        assert (info["time_step"].reward, info["time_step"].discount) == (None, 1.0)
        with pytest.raises(EpisodeStateError, match="has ended its episode"):
            gym.step(LLMResponse.from_text("1"))
    [episode] = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (episode["task_name"], episode["outcome"], episode["total_reward"]) == ("nim_7", "truncated", None)
    assert episode["error"]["limit"] == "steps"
