"""Replayed responses, and the report of a replay."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ares_exp.errors import PreflightError, ReplayDivergenceError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest, MessageEdit
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.replay import ReplayedEpisode, ReplayPolicy, ReplayReport, Score
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_request, serialize_llm_request
from ares_exp.trajectories.request_diff import Match, StepComparison
from tests.unit.trajectories.chats import chat, write


def recording(folder: Path, *episodes: EpisodeTrajectory) -> Path:
    for episode in episodes:
        write(folder / f"{episode.episode_id}.json", episode)
    return folder


def requests(episode: EpisodeTrajectory) -> list[LLMRequest]:
    return [deserialize_llm_request(step.observation) for step in episode.steps if step.observation is not None]


def result(
    task: str = "fix-bug", attempt: int = 0, outcome: Outcome = Outcome.COMPLETED, reward: float | None = 1.0
) -> EpisodeResult:
    return EpisodeResult(f"now-{attempt}", task, attempt, 0, outcome, reward)


async def ready(path: Path, **options: object) -> ReplayPolicy:
    policy = ReplayPolicy(trajectory=path, **options)
    await policy.preflight()
    return policy


async def execute(client: LLMClient, asked: list[LLMRequest]) -> list[str]:
    return [(await client(request)).text for request in asked]


def changed(request: LLMRequest, text: str) -> LLMRequest:
    return replace(request, messages=[*request.messages[:-1], {**request.messages[-1], "content": text}])


async def test_edits_of_a_branch_match_its_recording(tmp_path: Path) -> None:
    plain, edit = chat(length=4), MessageEdit("insert", 1, "Try pytest first.", step=1)
    steps = tuple(
        step if at == 0 or step.observation is None else replace(step, observation=shown)
        for at, step in enumerate(plain.steps)
        for shown in [step.observation and serialize_llm_request(edit.apply(deserialize_llm_request(step.observation)))]
    )
    assert steps != plain.steps
    metadata = {**plain.metadata, "edits": [edit.to_dict(), {"kind": "no such"}, 5]}
    policy = await ready(recording(tmp_path, replace(plain, steps=steps, metadata=metadata)))
    await execute(policy.for_episode(EpisodeSpec("fix-bug")), requests(plain))
    assert [step.match for step in policy.report([result()]).episodes[0].steps] == [Match.EXACT] * 3


async def test_advanced_requests_are_compared_and_skipped(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat(length=5)))
    first, second, third, fourth = requests(chat(length=5))
    client: Any = policy.for_episode(EpisodeSpec("fix-bug"))
    client.advance(first, LLMResponse.from_text("I do 1."))
    client.advance(changed(second, "done 7"), LLMResponse.from_text("I do 2."))
    assert await execute(client, [third, fourth]) == ["I do 3.", "I do 4."]
    [episode] = policy.report([result()]).episodes
    assert [step.match for step in episode.steps] == [Match.EXACT, Match.DIFFERENT, Match.EXACT, Match.EXACT]
    client.advance(fourth, LLMResponse.from_text("one more"))
    with pytest.raises(ReplayDivergenceError, match=r"has 4 actions, but the agent requests another one \(request 6\)"):
        await client(fourth)


async def test_strict_ends_at_the_first_difference(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat(length=4)), normalise=["durations"])
    first, second, _ = requests(chat(length=4))
    client = policy.for_episode(EpisodeSpec("fix-bug"))
    await execute(client, [first])
    told = r"Request 2 .*message 2 \(user\): recorded 'done 1', now 'done 7'"
    with pytest.raises(ReplayDivergenceError, match=told) as caught:
        await client(changed(second, "done 7"))
    assert (caught.value.step, caught.value.entry) == (1, None)
    assert caught.value.why.startswith("message 2 (user): recorded 'done 1', now 'done 7'")
    [episode] = policy.report([result(outcome=Outcome.POLICY_ERROR, reward=None)]).episodes
    assert [step.match for step in episode.steps] == [Match.EXACT, Match.DIFFERENT, Match.NOT_REACHED]
    assert episode.score == Score(1, 2), "what this policy did not let it reach does not count"


@pytest.mark.parametrize(("strict", "ends"), [(True, True), ("normalised", False), (False, False)])
async def test_strict_compares_normalised_requests(tmp_path: Path, strict: object, ends: bool) -> None:
    policy = await ready(
        recording(tmp_path, chat(length=4)), strict=strict, normalise=[{"pattern": "done .", "replacement": "done"}]
    )
    first, second, third = requests(chat(length=4))
    client = policy.for_episode(EpisodeSpec("fix-bug"))
    await client(first)
    if ends:
        with pytest.raises(ReplayDivergenceError):
            await client(changed(second, "done 7"))
        return
    await client(changed(second, "done 7"))
    if strict == "normalised":
        with pytest.raises(ReplayDivergenceError, match=r"Request 3 .*message 4 \(user\): -done; \+quite different"):
            await client(changed(third, "quite different"))


async def test_extra_and_missing_requests_lower_the_score(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat(length=3)), strict=False)
    asked = requests(chat(length=5))
    more, less = (policy.for_episode(EpisodeSpec("fix-bug", attempt)) for attempt in range(2))
    await execute(more, asked[:2])
    told = r"has 2 actions, but the agent requests another one \(request 3\)"
    with pytest.raises(ReplayDivergenceError, match=told) as caught:
        await more(asked[2])
    assert (caught.value.step, caught.value.entry) == (2, None)
    await execute(less, asked[:1])
    results = [result(outcome=Outcome.POLICY_ERROR, reward=None), result(attempt=1)]
    report = policy.report(results)
    assert [step.match for step in report.episodes[0].steps] == [Match.EXACT, Match.EXACT, Match.EXTRA]
    assert [step.match for step in report.episodes[1].steps] == [Match.EXACT, Match.NOT_REACHED]
    assert [episode.score for episode in report.episodes] == [Score(2, 3), Score(1, 2)]
    assert report.score == Score(3, 5)


async def test_request_recorded_without_response_stays_unanswered(tmp_path: Path) -> None:
    recorded = chat(length=4)
    steps = [replace(step, action=None) if at == 2 else step for at, step in enumerate(recorded.steps)]
    policy = await ready(recording(tmp_path, replace(recorded, steps=tuple(steps))))
    client = policy.for_episode(EpisodeSpec("fix-bug"))
    first, second, third = requests(recorded)
    assert await execute(client, [first]) == ["I do 1."]
    with pytest.raises(UnansweredError):
        await client(second)
    assert await execute(client, [third]) == ["I do 3."]


async def test_incomplete_recording_is_compared_to_its_end(tmp_path: Path) -> None:
    whole = chat("cut", length=5)
    (tmp_path / "cut.json").write_text("".join(list(dump_episode(whole))[:3]))
    policy = await ready(tmp_path, episode="cut")
    client = policy.for_episode(EpisodeSpec("fix-bug"))
    assert await execute(client, requests(whole)[:1]) == ["I do 1."]
    with pytest.raises(ReplayDivergenceError, match="has 1 actions"):
        await client(requests(whole)[1])
    [episode] = policy.report([result(outcome=Outcome.POLICY_ERROR, reward=None)]).episodes
    assert (episode.score, episode.recorded_outcome, episode.recorded_reward) == (Score(2, 2), Outcome.LOST, None)


async def test_episode_without_requests_scores_zero(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat(length=3)))
    failed = result(outcome=Outcome.CONTAINER_ERROR, reward=None)
    [episode] = policy.report([failed]).episodes
    assert [step.match for step in episode.steps] == [Match.NOT_REACHED] * 2
    assert (episode.score.value, episode.score) == (None, Score(0, 0))
    policy.for_episode(EpisodeSpec("fix-bug"))
    [episode] = policy.report([result(outcome=Outcome.AGENT_ERROR, reward=None)]).episodes
    assert episode.score == Score(0, 2)


async def test_episode_is_selected_by_id(tmp_path: Path) -> None:
    first, second = chat("a", length=3), replace(chat("b", length=3, start=2000.0), metadata={"seed": 11})
    path = recording(tmp_path, first, second)
    policy = await ready(path, episode="b")
    policy.for_episode(EpisodeSpec("fix-bug", 3))
    assert policy.seed_of("fix-bug", 3) == 11
    assert policy.report([result(attempt=3)]).episodes[0].recorded_id == "b"
    both = await ready(path)
    assert [both.seed_of("fix-bug", attempt) for attempt in range(3)] == [7, 11, 7]
    with pytest.raises(PreflightError, match="trajectory of episode c"):
        await ready(path, episode="c")


@pytest.mark.parametrize("seed", ["7", -1, 2**31, None, 1.5])
async def test_invalid_seed_is_ignored(tmp_path: Path, seed: object) -> None:
    policy = await ready(recording(tmp_path, replace(chat(), metadata={"seed": seed})))
    assert policy.seed_of("fix-bug", 0) is None


async def test_last_try_of_each_attempt_is_replayed(tmp_path: Path) -> None:
    def attempt(name: str, number: int, *, started: float, retry: int = 0, length: int) -> EpisodeTrajectory:
        metadata = {"attempt": number, **({"retry": retry} if retry else {})}
        return replace(chat(name, length=length), start_time=started, end_time=started + 1, metadata=metadata)

    recording(
        tmp_path / "run" / "trajectories",
        attempt("second", 1, started=5.0, length=4),
        attempt("lost", 0, started=6.0, length=2),
        attempt("again", 0, started=9.0, retry=1, length=5),
    )
    recording(tmp_path / "other" / "trajectories", attempt("of-another-run", 0, started=7.0, length=3))
    policy = await ready(tmp_path)
    for number in range(4):
        policy.for_episode(EpisodeSpec("fix-bug", number))
    report = policy.report([result(attempt=number) for number in range(4)])
    assert [one.recorded_id for one in report.episodes] == ["again", "second", "of-another-run", "again"]


async def test_report_omits_episodes_of_earlier_sessions(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat(length=4)))
    await execute(policy.for_episode(EpisodeSpec("fix-bug", 1)), requests(chat(length=4)))
    tries = [result(attempt=1, outcome=Outcome.CONTAINER_ERROR, reward=None), replace(result(attempt=1), retry=1)]
    not_started = result(attempt=2, outcome=Outcome.CONTAINER_ERROR, reward=None)
    report = policy.report([result(attempt=0), *tries, not_started])
    assert [(one.attempt, one.outcome) for one in report.episodes] == [(1, "completed"), (2, "container_error")]
    assert report.score == Score(3, 3)


async def test_unrecorded_task_is_an_error(tmp_path: Path) -> None:
    policy = await ready(recording(tmp_path, chat()))
    with pytest.raises(ReplayDivergenceError, match=r"'other'\. Its tasks are: fix-bug"):
        policy.for_episode(EpisodeSpec("other"))
    assert policy.seed_of("other", 0) is None
    assert policy.report([result("other", outcome=Outcome.POLICY_ERROR, reward=None)]).episodes == ()
    assert policy.report([result("other")]) is None, "an earlier session ran it"


@pytest.mark.parametrize(
    "options",
    [
        {"strict": "sometimes"},
        {"normalise": ["timestmps"]},
        {"normalise": [{"pattern": "("}]},
        {"normalise": ["dates"] * 51},
    ],
)
def test_wrong_options_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ReplayPolicy(trajectory=Path("x"), **options)


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def episode(task: str, attempt: int, *matches: Match, reward: float | None = 1.0) -> ReplayedEpisode:
    return ReplayedEpisode(
        task_name=task,
        attempt=attempt,
        recorded_id=f"{task}-then",
        episode_id=f"{task}-now-{attempt}",
        recorded_outcome=Outcome.COMPLETED,
        outcome=Outcome.COMPLETED if reward is not None else Outcome.POLICY_ERROR,
        recorded_reward=1.0,
        reward=reward,
        steps=tuple(StepComparison(number, match) for number, match in enumerate(matches)),
    )


def report(*episodes: ReplayedEpisode) -> ReplayReport:
    return ReplayReport(Path("outputs/first"), ("durations",), episodes)


def text(made: ReplayReport, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding=encoding) as stream:
        made.render(stream)
        return buffer.getvalue().decode(encoding)


EXACT, NORMALISED, DIFFERENT, EXTRA, MISSED = (
    Match.EXACT,
    Match.NORMALISED,
    Match.DIFFERENT,
    Match.EXTRA,
    Match.NOT_REACHED,
)


def test_score_is_the_share_of_matching_steps() -> None:
    made = report(
        episode("b", 0, EXACT, NORMALISED, DIFFERENT), episode("a", 1, EXACT), episode("a", 0, EXACT, MISSED, MISSED)
    )
    data = json.loads(json.dumps(made.to_dict()))
    assert (data["score"], data["matching_steps"], data["compared_steps"]) == (4 / 7, 4, 7)
    assert data["tasks"] == {
        "a": {"score": 0.5, "matching_steps": 2, "compared_steps": 4},
        "b": {"score": 2 / 3, "matching_steps": 2, "compared_steps": 3},
    }
    assert [(one["task_name"], one["attempt"]) for one in data["episodes"]] == [("a", 0), ("a", 1), ("b", 0)]
    assert data["episodes"][2]["steps"][2] == {"step": 2, "match": "different"}
    assert data["episodes"][0]["reward"] == {"recorded": 1.0, "now": 1.0}


def test_adjacent_steps_are_grouped() -> None:
    shown = text(report(episode("a", 0, EXACT, EXACT, EXACT, DIFFERENT, NORMALISED, MISSED, MISSED)))
    assert "a-then, attempt 0: steps 0-2 exact, 3 different, 4 normalised, 5-6 not reached" in shown
    assert "Determinism 0.57: 4 of 7 steps match." in shown


def test_table_omits_empty_columns() -> None:
    assert "extra" not in text(report(episode("a", 0, EXACT)))
    assert "extra" in text(report(episode("a", 0, EXACT, EXTRA)))
    assert "not reached" in text(report(episode("a", 0, EXACT, MISSED)))
    assert max(map(len, text(report(episode("task" * 30, 0, EXACT, EXTRA, MISSED))).splitlines()[:8])) <= 80


def test_different_rewards_and_endings_are_shown() -> None:
    shown = text(report(episode("a", 0, EXACT, reward=0.5)))
    assert "1.00 -> 0.50" in shown
    assert "reward 0.50; the recorded reward was 1.00" in shown
    shown = text(report(episode("a", 0, EXACT, reward=None)))
    assert "1.00 -> -" in shown
    assert "outcome policy_error; the recorded outcome was completed" in shown


def test_rounding_never_hides_a_difference() -> None:
    assert "Determinism 0.99: 999 of 1000" in text(report(episode("a", 0, *[EXACT] * 999, DIFFERENT)))
    assert "Determinism 0.01: 1 of 1000" in text(report(episode("a", 0, EXACT, *[DIFFERENT] * 999)))


def test_empty_report_has_no_score() -> None:
    assert report().to_dict()["score"] is None
    assert "no step could be compared" in text(report())


def test_control_characters_in_a_difference_are_escaped() -> None:
    first = StepComparison(0, Match.DIFFERENT, "message 0 (\x1b[2J)", diff=("-a\x1b[31m", "+[red]b[/red]"))
    made = report(ReplayedEpisode("\x1b[1mt", 0, "id\n", "n", Outcome.COMPLETED, Outcome.COMPLETED, 1.0, 1.0, (first,)))
    shown = text(made)
    assert "\x1b" not in shown
    assert "    +[red]b[/red]" in shown


def test_different_episodes_come_first() -> None:
    shown = text(report(*(episode(f"t{n:02}", 0, EXACT if n else DIFFERENT) for n in reversed(range(30)))))
    assert shown.index("t00-then") < shown.index("t01-then")
    assert "and 10 more episodes, in replay.json" in shown
    assert "t29-then" not in shown


def test_limited_encoding_replaces_characters() -> None:
    first = StepComparison(0, Match.DIFFERENT, "message 0 (user)", diff=("-ä…", "+ö"))
    made = report(ReplayedEpisode("täsk", 0, "id", "n", Outcome.COMPLETED, Outcome.COMPLETED, 1.0, 1.0, (first,)))
    assert "    -??" in text(made, "ascii")
