import json
from pathlib import Path

import pytest

from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    deserialize_llm_request,
    deserialize_llm_response,
    serialize_llm_request,
    serialize_llm_response,
)


def conversation(length: int, *, text: str = "x", frozen: bool = True) -> list[StepRecord]:
    """Records of an agent that appends two messages a step."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"task {text}"}]
    records = []
    for index in range(length):
        first, last = index == 0, index == length - 1
        observation = None if last and not first else serialize_llm_request(LLMRequest(messages, system_prompt="s"))
        action = None if first else serialize_llm_response(LLMResponse.from_text(f"answer {index}"))
        kind = "FIRST" if first else "LAST" if last else "MID"
        reward = None if first else 1.0 if last else 0.0
        records.append(
            StepRecord(index, kind, observation, action, reward, None if first else float(not last), float(index))
        )
        messages += [
            {"role": "assistant", "content": f"{index} {text}"},
            {"role": "user", "content": f"{index}! {text}"},
        ]
    return records


def record(directory: Path, records: list[StepRecord], **more: object) -> EpisodeTrajectory:
    collector = JsonTrajectoryCollector(directory)
    collector.begin_episode(task_name="t", episode_id="e")
    for item in records:
        collector.record_step(item)
    return collector.end_episode(**more)  # type: ignore[arg-type]


def test_what_is_loaded_equals_what_was_recorded(tmp_path: Path) -> None:
    trajectory = record(tmp_path / "new" / "folder", conversation(5))
    assert EpisodeTrajectory.load(tmp_path / "new" / "folder" / "e.json") == trajectory
    assert trajectory.num_steps == 5
    assert trajectory.total_reward == 1.0
    assert trajectory.outcome is Outcome.COMPLETED
    assert EpisodeTrajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


def test_an_edited_history_loads_as_it_was_at_each_step(tmp_path: Path) -> None:
    def step(index: int, *texts: str) -> StepRecord:
        messages = [{"role": "user", "content": text} for text in texts]
        return StepRecord(index, "MID", serialize_llm_request(LLMRequest(messages)), None, 0.0, 1.0, 0.0)

    trajectory = record(tmp_path, [step(0, "a", "b"), step(1, "a", "B", "c"), step(2, "c"), step(3, "a", "b")])
    loaded = EpisodeTrajectory.load(tmp_path / "e.json")
    assert loaded == trajectory
    texts = [[message["content"] for message in s.observation["messages"]] for s in loaded.steps if s.observation]
    assert texts == [["a", "b"], ["a", "B", "c"], ["c"], ["a", "b"]]


def test_messages_that_only_look_equal_stay_apart(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "user", "content": 1}, {"role": "user", "content": True}]
    trajectory = record(tmp_path, [StepRecord(0, "FIRST", {"messages": messages}, None, None, None, 0.0)])
    loaded = EpisodeTrajectory.load(tmp_path / "e.json")
    assert loaded == trajectory
    assert loaded.steps[0].observation is not None
    assert [type(m["content"]) for m in loaded.steps[0].observation["messages"]] == [str, int, bool]


def test_the_file_has_the_documented_keys(tmp_path: Path) -> None:
    record(tmp_path, conversation(3), truncated=True, error=ErrorInfo.of_limit("steps"))
    data = json.loads((tmp_path / "e.json").read_text())
    expected = "episode_id task_name steps start_time end_time total_reward num_steps truncated outcome error"
    assert set(expected.split()) <= set(data)
    assert data["outcome"] == "truncated"
    assert data["error"] == {"type": "limit", "message": "limit reached: steps", "limit": "steps"}
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]


@pytest.mark.parametrize(
    ("records", "expected"),
    [([], None), (conversation(3)[:1], None), (conversation(3)[:2], None), (conversation(3), 1.0)],
)
def test_a_missing_reward_is_none(tmp_path: Path, records: list[StepRecord], expected: float | None) -> None:
    assert record(tmp_path, records).total_reward == expected


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema_version": 99}', '{"episode_id": "e"}', "null", "[" * 100_000],
)
def test_a_file_that_is_no_trajectory_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(TrajectoryFormatError, match=r"e\.json"):
        EpisodeTrajectory.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryFormatError, match=r"gone\.json"):
        EpisodeTrajectory.load(tmp_path / "gone.json")


def step(index: int, reward: float | None, kind: str = "MID") -> StepRecord:
    return StepRecord(index, kind, None, None, reward, None if kind == "FIRST" else 1.0, 0.0)  # type: ignore[arg-type]


def test_returns_to_go(tmp_path: Path) -> None:
    trajectory = record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0), step(2, None), step(3, 4.0, "LAST")])
    assert trajectory.returns_to_go() == (5.0, 4.0, 4.0)
    assert trajectory.returns_to_go(0.5) == (2.0, 2.0, 4.0)
    assert trajectory.discounted_return(0.5) == 2.0
    assert trajectory.returns_to_go(0.0) == (1.0, 0.0, 4.0)
    for discount in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            trajectory.returns_to_go(discount)


def test_returns_without_a_reward_are_missing_too(tmp_path: Path) -> None:
    assert record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0)]).returns_to_go() == (None,)
    assert record(tmp_path / "other", [step(0, None, "FIRST")]).discounted_return() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_index", "0"),
        ("step_type", "NEXT"),
        ("reward", "1"),
        ("timestamp", None),
        ("action", [1]),
        ("discount", True),
        ("commands", [{"command": "ls", "exit_code": "0", "duration_sec": 1.0}]),
    ],
)
def test_a_field_of_the_wrong_type_is_named(name: str, value: object) -> None:
    data = json.loads(json.dumps(step(1, 0.0).to_dict()))
    assert StepRecord.from_dict(data) == step(1, 0.0)
    with pytest.raises((TypeError, ValueError), match="exit_code" if name == "commands" else name):
        StepRecord.from_dict({**data, name: value})


def test_requests_and_responses_round_trip() -> None:
    request = LLMRequest(
        [{"role": "user", "content": "q"}], max_output_tokens=5, temperature=0.0, stop_sequences=["a"], tools=[{"n": 1}]
    )
    assert deserialize_llm_request(json.loads(json.dumps(serialize_llm_request(request)))) == request
    response = LLMResponse(
        (TextData("a"), ToolCallData("1", "f", "{}")),
        cost=0.5,
        usage=Usage(1, 2),
        logprobs=(-0.1,),
        completion_token_ids=(3,),
        model="m",
    )
    back = deserialize_llm_response(json.loads(json.dumps(serialize_llm_response(response))))
    assert (tuple(back.data), back.cost, back.usage, back.model) == (response.data, 0.5, Usage(1, 2), "m")
    assert (tuple(back.logprobs or ()), tuple(back.completion_token_ids or ())) == ((-0.1,), (3,))


def test_a_collector_without_an_episode_says_so(tmp_path: Path) -> None:
    collector = JsonTrajectoryCollector(tmp_path)
    with pytest.raises(RuntimeError, match="No episode in progress"):
        collector.record_step(conversation(1)[0])
    with pytest.raises(RuntimeError, match="No episode in progress"):
        collector.end_episode()
    handle = collector.begin_episode(task_name="a")
    collector.end_episode(episode=handle)
    with pytest.raises(RuntimeError, match="No episode in progress"):
        collector.end_episode(episode=handle)


def test_two_open_episodes_need_a_handle(tmp_path: Path) -> None:
    collector = JsonTrajectoryCollector(tmp_path)
    one, two = collector.begin_episode(task_name="a"), collector.begin_episode(task_name="b")
    with pytest.raises(RuntimeError, match="episode="):
        collector.record_step(conversation(1)[0])
    collector.record_step(conversation(1)[0], episode=two)
    assert collector.end_episode(episode=one).num_steps == 0
    assert collector.end_episode(episode=two).num_steps == 1


@pytest.mark.parametrize("episode_id", ["../x", "a/b", "", "x" * 300])
def test_an_episode_id_that_is_no_file_name_is_refused(tmp_path: Path, episode_id: str) -> None:
    with pytest.raises(ValueError, match="episode id"):
        JsonTrajectoryCollector(tmp_path).begin_episode(task_name="a", episode_id=episode_id)


@pytest.mark.parametrize(
    ("field", "value"), [("start_time", 10**400), ("total_reward", 10**400), ("metadata", 3), ("metadata", ["a"])]
)
def test_what_nothing_can_be_computed_with_is_refused(tmp_path: Path, field: str, value: object) -> None:
    data = record(tmp_path, conversation(2)).to_dict()
    with pytest.raises(TrajectoryFormatError, match=f"expected `{field}` to be a"):
        EpisodeTrajectory.from_dict({**data, field: value})
