import contextlib
import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp.containers.activity import CommandRecord
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.atif import reader as atif_reader
from ares_exp.trajectories.atif.reader import from_atif, load_atif
from ares_exp.trajectories.atif.schema import check_atif
from ares_exp.trajectories.atif.writer import NO_CHAT, PARTS, REWRITTEN, SURROGATES, to_atif, write_atif
from ares_exp.trajectories.collectors.atif_collector import AtifTrajectoryCollector
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)
from tests.examples import examples
from tests.unit.trajectories.atif_examples import at, counting, smallest
from tests.unit.trajectories.chats import chat, with_answer
from tests.unit.trajectories.strategies import json_values, linear_trajectories, trajectories

TOOL = {"type": "function", "function": {"name": "run", "parameters": {}}}


def record(index: int, messages: Any, response: LLMResponse | None, **more: Any) -> StepRecord:
    """A record; without messages a LAST one."""
    settings = more.pop("settings", {"system_prompt": "Be brief."})
    return StepRecord(
        index,
        "FIRST" if response is None else "MID" if messages is not None else "LAST",
        None if messages is None else serialize_llm_request(LLMRequest(messages, **settings)),
        None if response is None else serialize_llm_response(response),
        None if response is None else 0.0 if messages is not None else 1.0,
        None if response is None else 1.0 if messages is not None else 0.0,
        1767603600.25 + index,
        **more,
    )


def episode(*steps: StepRecord, **more: Any) -> EpisodeTrajectory:
    fields: dict[str, Any] = {"outcome": Outcome.COMPLETED, "metadata": {"agent": "ShellAgent", "seed": 7}} | more
    return EpisodeTrajectory(
        "e1", "sort", steps, 1767603600.0, 1767603609.0, total_reward(steps), len(steps), False, **fields
    )


def shell_episode() -> EpisodeTrajectory:
    """As the shell agent makes them: two commands, the second of which submits."""
    task = {"role": "user", "content": "Count the lines."}
    reply = "Counting.\n```bash\nwc -l data\n```"
    shown = [task, {"role": "assistant", "content": reply}, {"role": "user", "content": "<output>\n42\n</output>"}]
    answer = LLMResponse.from_text(
        reply,
        cost=0.25,
        usage=Usage(4, 3),
        prompt_token_ids=[1, 2, 3, 4],
        completion_token_ids=[5, 6, 7],
        logprobs=[-0.5, -0.25, 0.0],
        finish_reason="stop",
        model="local/tiny",
        latency_sec=0.5,
        policy_version="3",
    )
    ran = CommandRecord("wc -l data", 0, 0.125)
    submitted = CommandRecord("echo DONE", None, 9.5, timed_out=True)
    return episode(
        record(0, [task], None),
        record(1, shown, answer, commands=(ran,), policy_sec=0.5, environment_sec=0.25, container_sec=0.125),
        record(2, None, LLMResponse.from_text("Done."), commands=(submitted,)),
    )


def over_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


def gist(trajectory: EpisodeTrajectory) -> Any:
    """What a document keeps of an episode: everything but sampling settings and odd fields of messages."""
    steps = []
    for step in trajectory.steps:
        messages = [(m.get("role"), m.get("content")) for m in (step.observation or {}).get("messages", ())]
        seconds = (step.policy_sec, step.environment_sec, step.container_sec)
        facts = (step.step_index, step.step_type, step.reward, step.discount, step.timestamp)
        steps.append((facts, messages, step.action, step.commands, seconds))
    return replace(trajectory, steps=(), unfinished_step=None), trajectory.unfinished_step, steps


@examples(20)
@given(linear_trajectories())
def test_a_linear_episode_comes_back_and_says_it_once(trajectory: EpisodeTrajectory) -> None:
    document, dropped = to_atif(trajectory)
    read, _ = from_atif(over_json(document))
    assert replace(read, steps=()) == replace(trajectory, steps=())
    assert [step.reward for step in read.steps] == [step.reward for step in trajectory.steps]
    assert [step.step_type for step in read.steps] == [step.step_type for step in trajectory.steps]
    assert set(dropped) <= {PARTS}
    assert not [step for step in document["steps"] if "context_management" in step.get("extra", {})]


@examples(20)
@given(trajectories())
def test_any_episode_is_a_valid_document_with_all_its_actions(trajectory: EpisodeTrajectory) -> None:
    document, dropped = to_atif(trajectory)
    check_atif(over_json(document))
    assert document.get("notes", "") == " ".join(f"{what}." for what in dropped)
    actions = sum(step.action is not None for step in trajectory.steps)
    assert sum(step["source"] == "agent" and step.get("llm_call_count") != 0 for step in document["steps"]) == actions
    del document["extra"]
    foreign, _ = from_atif(over_json(document))
    assert sum(step.action is not None for step in foreign.steps) == actions


def test_a_shell_agents_episode_comes_back_from_its_document() -> None:
    read, dropped = from_atif(over_json(to_atif(shell_episode())[0]))
    assert gist(read) == gist(shell_episode())
    assert read.steps[0].observation == shell_episode().steps[0].observation
    assert dropped == []


def test_a_shell_agents_episode_reads_as_one_expects() -> None:
    document, dropped = to_atif(shell_episode())
    assert not dropped
    assert [(step["source"], step["message"]) for step in document["steps"]] == [
        ("system", "Be brief."),
        ("user", "Count the lines."),
        ("agent", "Counting.\n```bash\nwc -l data\n```"),
        ("agent", "Done."),
    ]
    acted, submitted = document["steps"][2:]
    assert acted["timestamp"] == "2026-01-05T09:00:01.250000Z"
    assert acted["model_name"] == "local/tiny"
    assert acted["llm_call_count"] == 1
    (call,) = acted["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("bash", {"command": "wc -l data"})
    assert call["extra"]["ares_exp"]["command"] == {"exit_code": 0, "duration_sec": 0.125, "timed_out": False}
    assert acted["observation"]["results"] == [
        {"source_call_id": call["tool_call_id"], "content": "<output>\n42\n</output>"}
    ]
    assert acted["metrics"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cost_usd": 0.25,
        "prompt_token_ids": [1, 2, 3, 4],
        "completion_token_ids": [5, 6, 7],
        "logprobs": [-0.5, -0.25, 0.0],
    }
    assert submitted["tool_calls"][0]["extra"]["ares_exp"]["command"]["timed_out"] is True
    assert "observation" not in submitted
    assert document["final_metrics"] == {
        "total_prompt_tokens": 4,
        "total_completion_tokens": 3,
        "total_cost_usd": 0.25,
        "total_steps": 4,
    }
    assert document["trajectory_id"] == "e1"
    assert document["agent"] == {"name": "ShellAgent", "version": "unknown", "model_name": "local/tiny"}
    assert json.dumps(document).count("Count the lines.") == 1


def test_tool_calls_of_the_llm_keep_their_ids_and_get_their_results() -> None:
    task = {"role": "user", "content": "Go."}
    pieces = [TextData("Both."), ToolCallData("c1", "run", '{"command": "ls"}'), ToolCallData("c2", "run", "{oops")]
    calls = [
        {"id": piece.id, "type": "function", "function": {"name": "run", "arguments": piece.arguments}}
        for piece in pieces
        if isinstance(piece, ToolCallData)
    ]
    history = [
        task,
        {"role": "assistant", "content": "Both.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "no JSON"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a.txt"}]},
        {"role": "user", "content": "Go on."},
    ]
    with_tools = {"tools": [TOOL]}
    trajectory = episode(
        record(0, [task], None, settings=with_tools),
        record(1, history, LLMResponse(pieces), settings=with_tools, commands=(CommandRecord("ls", 0, 1.0),)),
    )
    document, dropped = to_atif(trajectory)
    assert not dropped
    agent = document["steps"][1]
    assert [(c["tool_call_id"], c["arguments"]) for c in agent["tool_calls"]] == [("c1", {"command": "ls"}), ("c2", {})]
    assert agent["observation"]["results"] == [
        {"source_call_id": "c2", "content": "no JSON"},
        {"source_call_id": "c1", "content": [{"type": "text", "text": "a.txt"}]},
    ]
    assert [step["message"] for step in document["steps"]] == ["Go.", "Both.", "Go on."]
    assert document["agent"]["tool_definitions"] == [TOOL]
    read, _ = from_atif(over_json(document))
    assert [step.observation for step in read.steps] == [step.observation for step in trajectory.steps]
    assert gist(read) == gist(trajectory)


def test_a_rewritten_history_is_told_as_the_format_wants_it() -> None:
    task, summary = {"role": "user", "content": "Go."}, {"role": "user", "content": "So far: nothing."}
    reply = {"role": "assistant", "content": "one"}
    trajectory = episode(
        record(0, [task], None),
        record(1, [task, reply, {"role": "user", "content": "more"}], LLMResponse.from_text("one")),
        record(2, [task, summary], LLMResponse.from_text("two")),
    )
    document, dropped = to_atif(trajectory)
    assert dropped == [REWRITTEN]
    told, shown = document["steps"][-2:]
    assert told["source"] == "system"
    assert told["extra"]["context_management"] == {"type": "rewrite", "boundary": "replace"}
    assert told["observation"]["results"] == [{"content": "[user]\nGo."}]
    assert (shown["source"], shown["message"]) == ("user", "So far: nothing.")
    read, not_held = from_atif(over_json(document))
    assert not_held == ["Rewritten histories are read as the document shows them"]
    assert [message["content"] for message in read.steps[-1].observation["messages"]] == [  # type: ignore[index]
        "[user]\nGo.",
        "So far: nothing.",
    ]


def test_a_window_that_slides_makes_a_document_of_bounded_size() -> None:
    texts = [f"{number} {'x' * 2000}" for number in range(60)]
    windows = [[{"role": "user", "content": text} for text in texts[at : at + 30]] for at in range(30)]
    steps = [record(at, window, LLMResponse.from_text("y") if at else None) for at, window in enumerate(windows)]
    document, _ = to_atif(episode(*steps))
    assert len(json.dumps(document)) < 60 * 2000 + 30 * 12_000


def test_settings_and_prompts_may_change() -> None:
    messages = [{"role": "user", "content": "Go."}]
    longer = [*messages, {"role": "assistant", "content": "a"}]
    trajectory = episode(
        record(0, messages, None, settings={"system_prompt": "A", "tools": [TOOL], "temperature": 0.5}),
        record(1, longer, LLMResponse.from_text("a"), settings={"system_prompt": "B", "temperature": 0.5}),
        record(2, longer, LLMResponse.from_text("b"), settings={"metadata": {"turn": 2}}),
    )
    document, _ = to_atif(trajectory)
    assert [step["message"] for step in document["steps"] if step["source"] == "system"][:2] == ["A", "B"]
    ours = [
        document["extra"]["ares_exp"],
        *(s["extra"]["ares_exp"] for s in document["steps"] if s["source"] == "agent"),
    ]
    assert [one.get("settings") for one in ours] == [{"temperature": 0.5}, None, {"metadata": {"turn": 2}}]
    assert "Sampling settings are left out" in from_atif(over_json(document))[1]


def test_unequal_token_lists_and_media_are_kept_where_they_are_valid() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.PNG"}}
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, picture, inline]}]
    answer = LLMResponse.from_text("ok", completion_token_ids=[1, 2], logprobs=[-0.5])
    trajectory = episode(record(0, messages, None), record(1, None, answer))
    document, dropped = to_atif(trajectory)
    assert dropped == [PARTS]
    assert "logprobs" not in document["steps"][2]["metrics"]
    assert document["steps"][1]["message"] == [
        {"type": "text", "text": "See"},
        {"type": "image", "source": {"media_type": "image/png", "path": "https://example.org/a.PNG"}},
        {"type": "text", "text": "[image_url]"},
    ]
    assert document["steps"][2]["extra"]["ares_exp"]["action"] == {"logprobs": [-0.5]}


def test_half_a_surrogate_pair_is_replaced_and_told() -> None:
    trajectory = episode(record(0, [{"role": "user", "content": "a\ud83d"}], None))
    document, dropped = to_atif(trajectory)
    assert dropped == [SURROGATES]
    assert document["steps"][1]["message"].startswith("a\ufffd")
    json.dumps(document, ensure_ascii=False).encode()


def test_foreign_observations_and_an_empty_episode() -> None:
    steps = (
        StepRecord(0, "FIRST", {"board": [0, 1]}, None, None, None, 0.0),
        StepRecord(1, "LAST", None, {"move": 3}, 1.0, 0.0, 1.0),
    )
    document, dropped = to_atif(episode(*steps))
    assert dropped == [NO_CHAT]
    assert [step["message"] for step in document["steps"]] == ['{"board": [0, 1]}', '{"move": 3}']
    failed = episode(outcome=Outcome.CONTAINER_ERROR, error=ErrorInfo("ContainerStartError", "no image"))
    assert from_atif(over_json(to_atif(failed)[0])) == (failed, [])  # without a record


def test_the_example_of_somebody_else_is_read() -> None:
    trajectory, dropped = from_atif(counting())
    assert not dropped
    first, second, last = trajectory.steps
    assert first.observation == {
        "messages": ({"role": "user", "content": "Count the lines in data.csv."},),
        "system_prompt": "You operate a Linux shell.",
    }
    assert second.action is not None
    assert second.observation is not None
    assert second.action["usage"] == {"prompt_tokens": 4, "generated_tokens": 3}
    assert second.action["logprobs"] == (-0.11, -0.02, -0.4)
    assert second.action["data"][1] == {"id": "t1", "name": "sh", "arguments": '{"cmd": "wc -l data.csv"}'}
    assert second.observation["messages"][2] == {"role": "tool", "tool_call_id": "t1", "content": "42 data.csv"}
    assert (last.step_type, last.observation, last.reward) == ("LAST", None, None)
    assert trajectory.total_reward is None
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.episode_id, trajectory.start_time) == ("root", 1767603600.0)
    assert trajectory.metadata["atif"]["session_id"] == "run-7f3a"
    assert gist(from_atif(over_json(to_atif(trajectory)[0]))[0]) == gist(trajectory)


def test_a_document_without_an_agent_step_is_a_first_record() -> None:
    trajectory, dropped = from_atif(smallest())
    assert not dropped
    assert [step.step_type for step in trajectory.steps] == ["FIRST"]
    assert trajectory.outcome is Outcome.CLOSED
    assert len(trajectory.episode_id) == 32
    assert from_atif(smallest())[0] == trajectory


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("steps.2.reasoning_effort", "high", "`reasoning_effort`"),
        ("steps.2.extra", {"x": 1}, "`extra` of steps"),
        ("steps.2.tool_calls.0.extra", {"x": 1}, "`extra` of steps"),
        ("steps.2.metrics.extra", {"x": 1}, "`extra` of steps"),
        ("steps.2.metrics.logprobs", [-0.1], "Log-probabilities"),
        ("steps.2.llm_call_count", 2, "several LLM calls"),
        ("steps.2.observation.results.0.subagent_trajectory_ref", [{"trajectory_id": "x"}], "subagents"),
        ("subagent_trajectories", [smallest() | {"trajectory_id": "x"}], "subagents"),
        ("steps.1.message", [{"type": "audio", "source": {"media_type": "audio/wav", "path": "a"}}], "Recordings"),
        ("steps.3.message", [{"type": "image", "source": {"media_type": "image/png", "path": "a"}}], "images of agent"),
    ],
)
def test_what_a_trajectory_cannot_hold_is_told(place: str, value: Any, told: str) -> None:
    (dropped,) = from_atif(at(counting(), place, value))[1]
    assert told in dropped


def test_reasoning_and_cached_tokens_of_anybody_are_read_and_written() -> None:
    document = at(at(counting(), "steps.2.reasoning_content", "hm"), "steps.2.metrics.cached_tokens", 3)
    trajectory, dropped = from_atif(document)
    assert not dropped
    action = trajectory.steps[1].action
    assert action is not None
    assert action["data"][0] == {"thinking": "hm"}
    assert action["usage"] == {"prompt_tokens": 4, "generated_tokens": 3, "cached_tokens": 3}
    written = to_atif(trajectory)[0]
    [step] = [step for step in written["steps"] if "reasoning_content" in step]
    assert (step["reasoning_content"], step["metrics"]["cached_tokens"]) == ("hm", 3)
    assert "thinking" not in step["extra"]["ares_exp"].get("action", {})
    assert written["final_metrics"]["total_cached_tokens"] == 3


def test_signed_and_encrypted_reasoning_comes_back() -> None:
    pieces = [ThinkingData("hm", "seal"), ThinkingData("Zm8=", redacted=True), TextData("I do 1.")]
    episode = with_answer(chat(length=2), LLMResponse(pieces, usage=Usage(9, 8, reasoning_tokens=5)))
    document = over_json(to_atif(episode)[0])
    assert [step["reasoning_content"] for step in document["steps"] if "reasoning_content" in step] == ["hm"]
    assert [step.action for step in from_atif(document)[0].steps] == [step.action for step in episode.steps]


def test_copied_steps_are_context_and_no_actions() -> None:
    document = at(counting(), "steps.2.is_copied_context", True)
    trajectory, _ = from_atif(document)
    assert [step.step_type for step in trajectory.steps] == ["FIRST", "LAST"]
    assert [m["role"] for m in trajectory.steps[0].observation["messages"]] == [  # type: ignore[index]
        "user",
        "assistant",
        "tool",
    ]


@examples(50)
@given(st.data())
def test_a_document_with_a_thing_replaced_is_read_or_refused(data: st.DataObject) -> None:
    original = to_atif(shell_episode())[0] if data.draw(st.booleans()) else counting()
    document = copy.deepcopy(original)
    inner: Any = document
    while True:
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.integers(0, 4)) == 0:
            break
        inner = inner[key]
    inner[key] = data.draw(json_values | st.just(original["steps"]))
    with contextlib.suppress(TrajectoryFormatError):  # any other error is a defect
        to_atif(from_atif(document)[0])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("extra.ares_exp.outcome", "fine"),
        ("extra.ares_exp.total_reward", "1"),
        ("extra.ares_exp.metadata", 5),
        ("steps.2.extra.ares_exp.record", 5),
        ("extra.ares_exp.first", 5),
        ("steps.2.extra.ares_exp.action", 5),
        ("steps.2.extra.ares_exp.record", {"step_type": "SOME"}),
        ("steps.2.extra.ares_exp.record.reward", "1"),
        ("steps.3.extra.ares_exp.record.discount", "1"),
        ("steps.2.tool_calls.0.extra.ares_exp.command", {}),
    ],
)
def test_what_is_broken_under_our_own_keys_is_refused(place: str, value: Any) -> None:
    document = at(to_atif(shell_episode())[0], place, value)
    with pytest.raises(TrajectoryFormatError):
        from_atif(document)


def test_conversations_that_repeat_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atif_reader, "MAX_REPEATED_MESSAGES", 1000)
    document = smallest()
    document["steps"] = [{"step_id": n, "source": ("user", "agent")[n % 2], "message": ""} for n in range(1, 100)]
    with pytest.raises(TrajectoryFormatError, match="at most 1000 messages"):
        from_atif(document)


def test_depth_without_end_is_refused(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(1_000_000):
        deep = [deep]
    with pytest.raises(TrajectoryFormatError, match="nested too deeply"):
        from_atif(smallest() | {"extra": {"deep": deep}})
    path = tmp_path / "deep.atif.json"
    path.write_text('{"schema_version": ' * 100_000)
    with pytest.raises(TrajectoryFormatError, match=r"deep\.atif\.json: .*nested too deeply"):
        load_atif(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"agent": 1}', "\ud800"])
def test_files_that_are_no_documents_are_refused_with_their_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.atif.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(TrajectoryFormatError, match=r"x\.atif\.json: "):
        load_atif(path)
    with pytest.raises(TrajectoryFormatError, match=r"y\.atif\.json: No such file"):
        load_atif(tmp_path / "y.atif.json")


def test_a_file_has_a_line_for_each_step_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "e1.atif.json"
    assert not write_atif(path, shell_episode())
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 4 + 1
    assert json.loads(path.read_text()) == to_atif(shell_episode())[0]
    assert gist(load_atif(path)[0]) == gist(shell_episode())


def test_the_collector_writes_documents_and_logs_what_they_lack_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = AtifTrajectoryCollector(tmp_path / "atif", clock=lambda: 7.0)
    ended = []
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            collector.begin_episode(task_name="board", episode_id=f"e{number}", metadata={"seed": number})
            collector.record_step(StepRecord(0, "FIRST", {"board": [number]}, None, None, None, 0.0))
            assert [path.name for path in (tmp_path / "atif").glob(f"e{number}*")] == [f"e{number}.json"]
            ended.append(collector.end_episode())
            assert caplog.text.count(NO_CHAT) == 1
    collector.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    paths = sorted((tmp_path / "atif").glob("e*"))
    assert [path.name for path in paths] == ["e0.atif.json", "e0.json", "e1.atif.json", "e1.json"]
    assert [EpisodeTrajectory.load(path) for path in paths[1::2]] == ended
    assert [NO_CHAT in json.loads(path.read_text())["notes"] for path in paths[::2]] == [True, True]
