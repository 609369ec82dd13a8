"""Episodes over a trainer's own endpoint, in containers: rows are what it sampled, from memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.scripting.rollouts import FinishedEpisode
from ares_exp.training.recorded_sequences import RecordedSequences
from ares_exp.training.sequences import TrainingSequence, sequences_of
from tests.e2e.conftest import SUBMIT
from tests.loopback_endpoint import LoopbackEndpoint
from tests.token_engine import TokenEngine
from tests.unit.training.sampled_episodes import check_rule

pytestmark = pytest.mark.local
GREET = "I write it.\n\n```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
TASK = ["env.tasks=[write-greeting]"]


def asking(endpoint: LoopbackEndpoint) -> list[str]:
    """The options of the page."""
    return [
        f"policy.base_url={endpoint.url}",
        "policy.model=policy",
        "policy.temperature=1",
        "policy.extra_body={return_token_ids: true, logprobs: true}",
    ]


async def play(engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> FinishedEpisode:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-trainer")
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        episodes = ares_exp.rollouts(
            env="harbor_samples", policy="chat_completions", overrides=[*TASK, *asking(endpoint)]
        )
        [episode] = [episode async for episode in episodes]
    assert episode.trajectory is not None
    return episode


def rows_of(episode: FinishedEpisode) -> tuple[TrainingSequence, ...]:
    assert episode.trajectory is not None
    return sequences_of(episode.trajectory).rows


async def test_rows_are_what_the_endpoint_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TokenEngine([GREET, SUBMIT])
    episode = await play(engine, monkeypatch)
    (row,) = rows_of(episode)
    first, second = engine.calls
    assert row.ids == (*second.prompt, *second.completion)
    assert check_rule([row], engine.calls) == row.trained_tokens == len(first.completion) + len(second.completion)
    assert (row.reward, row.task, row.policy_versions) == (1.0, "write-greeting", ("step-7",))


async def test_a_history_in_other_tokens_than_were_sampled_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TokenEngine([GREET, SUBMIT], spelling="own")
    kept, forked = rows_of(await play(engine, monkeypatch))
    assert (kept.made, forked.made) == ("clean", "forked")
    assert forked.ids == (*engine.calls[1].prompt, *engine.calls[1].completion)
    assert check_rule([kept, forked], engine.calls) == sum(len(call.completion) for call in engine.calls)


async def test_an_engine_that_keeps_what_was_sampled_gives_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TokenEngine([GREET, SUBMIT], spelling="own", continues=True)
    (row,) = rows_of(await play(engine, monkeypatch))
    assert row.made == "clean"
    assert check_rule([row], engine.calls) == sum(len(call.completion) for call in engine.calls)


def test_rows_of_the_run_directory_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-trainer")
    engine, run = TokenEngine([GREET, SUBMIT]), tmp_path / "run"
    options: list[Any] = ["env=harbor_samples", *TASK, "attempts=2", "concurrency=1", "tracker=none"]
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        results = ares_exp.run(
            [*options, "policy=chat_completions", *asking(endpoint), f"hydra.run.dir={run}"], quiet=True
        )
    assert results.exit_code == 0
    reports = list(RecordedSequences(run).new())
    assert [(row.attempt, row.reward, row.made) for report in reports for row in report.rows] == [
        (0, 1.0, "clean"),
        (1, 1.0, "clean"),
    ]
    for report, calls in zip(reports, (engine.calls[:2], engine.calls[2:]), strict=True):
        assert check_rule(report.rows, calls) == sum(len(call.completion) for call in calls)
