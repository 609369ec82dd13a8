"""Episodes over a trainer's own endpoint, in containers: rows are what it sampled, from memory and from disk."""

import json
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.errors import UntrainableError
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING
from ares_exp.runs.rollouts import FinishedEpisode
from ares_exp.training.recorded_sequences import RecordedSequences
from ares_exp.training.sequences import TrainingSequence, sequences_of
from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.e2e.conftest import SUBMIT
from tests.loopback_endpoint import LoopbackEndpoint
from tests.token_engine import TokenEngine
from tests.unit.training.sampled_episodes import check_rule

pytestmark = pytest.mark.local
GREET = "I write it.\n\n```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
TASK = ["env.tasks=[write-greeting]"]
AGENT = Path(__file__).parents[1] / "data" / "agents" / "streaming_agent.py"
GENERATION_CONFIG = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 2,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.3,
}


def asking(endpoint: LoopbackEndpoint) -> list[str]:
    return [
        f"policy.base_url={endpoint.url}",
        "policy.model=policy",
        "policy.temperature=1",
        "policy.extra_body={return_token_ids: true, logprobs: true}",
    ]


async def execute(engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> FinishedEpisode:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-trainer")
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        episodes = ares_exp.rollouts(env="harbor", policy="openai", overrides=[*TASK, *asking(endpoint)])
        [episode] = [episode async for episode in episodes]
    assert episode.trajectory is not None
    return episode


def rows_of(episode: FinishedEpisode) -> tuple[TrainingSequence, ...]:
    assert episode.trajectory is not None
    return sequences_of(episode.trajectory).rows


async def test_rows_contain_the_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TokenEngine([GREET, SUBMIT])
    episode = await execute(engine, monkeypatch)
    (row,) = rows_of(episode)
    first, second = engine.calls
    assert row.ids == (*second.prompt, *second.completion)
    assert check_rule([row], engine.calls) == row.trained_tokens == len(first.completion) + len(second.completion)
    assert (row.reward, row.task, row.policy_versions) == (1.0, "write-greeting", ("step-7",))


def test_rows_of_the_run_directory_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-trainer")
    engine, run = TokenEngine([GREET, SUBMIT]), tmp_path / "run"
    options: list[Any] = ["env=harbor", *TASK, "attempts=2", "concurrency=1", "tracker=none"]
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        results = ares_exp.run([*options, "policy=openai", *asking(endpoint), f"hydra.run.dir={run}"], quiet=True)
    assert results.exit_code == 0
    reports = list(RecordedSequences(run).new())
    assert [(row.attempt, row.reward, row.made) for report in reports for row in report.rows] == [
        (0, 1.0, "clean"),
        (1, 1.0, "clean"),
    ]
    for report, calls in zip(reports, (engine.calls[:2], engine.calls[2:]), strict=True):
        assert check_rule(report.rows, calls) == sum(len(call.completion) for call in calls)


def run_with_defaults(run: Path, engine: TokenEngine, *words: str) -> EpisodeTrajectory:
    """Runs the task against a vLLM server whose model has a generation config."""
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        asked = ["policy=vllm", "policy.model=policy", f"policy.base_url={endpoint.url}"]
        options = ["env=harbor", *TASK, "container=local", "tracker=none", f"hydra.run.dir={run}"]
        assert ares_exp.run([*options, *asked, *words], quiet=True).exit_code == 0
    [episode] = load(run).trajectories()
    return episode


def recorded_sampling(episode: EpisodeTrajectory) -> list[dict[str, Any]]:
    """Returns the recorded value of each parameter that a generation config may set, by call."""
    actions = [step.action for step in episode.steps if step.action is not None]
    return [{name: action["sampling"].get(name) for name in GENERATION_CONFIG} for action in actions]


def test_rows_do_not_depend_on_the_generation_config(tmp_path: Path) -> None:
    engine = TokenEngine([GREET, SUBMIT], defaults=GENERATION_CONFIG)
    episode = run_with_defaults(tmp_path / "run", engine)
    assert engine.sampled_with == recorded_sampling(episode) == [NEUTRAL_SAMPLING] * 2
    report = sequences_of(episode)
    assert (report.made, report.unstated_sampling) == ({"clean": 1}, 0)


@pytest.mark.parametrize(
    "wire", ["messages", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("chat_completions", "responses"))]
)
def test_sampling_of_programs_is_sent_and_recorded(tmp_path: Path, wire: str) -> None:
    """Whether or not the request of the program sets it, and whether or not it is forwarded."""
    own = {"temperature": 0.5, "top_p": 0.9}
    command = [
        "agent=command",
        "agent.command='python3 /opt/agent.py'",
        f"agent.files={{/opt/agent.py: {AGENT}}}",
        f"agent.env={{WIRE: {wire}, SAMPLING: '{json.dumps(own)}'}}",
    ]
    for forwards, expected in (("false", NEUTRAL_SAMPLING), ("true", {**NEUTRAL_SAMPLING, **own})):
        engine = TokenEngine([GREET], defaults=GENERATION_CONFIG)
        episode = run_with_defaults(tmp_path / forwards, engine, *command, f"agent.forward_sampling={forwards}")
        assert episode.total_reward == 1.0
        assert engine.sampled_with == recorded_sampling(episode) == [expected]
    with pytest.raises(UntrainableError, match=r"temperature 0\.5"):
        sequences_of(episode)
