import json
from pathlib import Path
from typing import Any

from hypothesis import given

from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.request import LLMRequest, freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.tasks.task_files import read_prior_context
from ares_exp.trajectories.exports.atif_writer import NO_CHAT, PARTS, REWRITTEN, SURROGATES, to_atif, write_atif
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)
from tests.examples import examples
from tests.unit.trajectories.atif_schema import validate_atif
from tests.unit.trajectories.chats import chat, with_response
from tests.unit.trajectories.strategies import trajectories

TOOL = {"type": "function", "function": {"name": "run", "parameters": {}}}


def record(index: int, messages: Any, response: LLMResponse | None, **more: Any) -> StepRecord:
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
    response = LLMResponse.from_text(
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
        record(1, shown, response, commands=(ran,), policy_sec=0.5, environment_sec=0.25, container_sec=0.125),
        record(2, None, LLMResponse.from_text("Done."), commands=(submitted,)),
    )


def over_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@examples(20)
@given(trajectories())
def test_any_episode_becomes_a_valid_complete_document(trajectory: EpisodeTrajectory) -> None:
    document, dropped = to_atif(trajectory)
    validate_atif(over_json(document))
    assert document.get("notes", "") == " ".join(f"{what}." for what in dropped)
    actions = sum(step.action is not None for step in trajectory.steps)
    assert sum(step["source"] == "agent" and step.get("llm_call_count") != 0 for step in document["steps"]) == actions


def test_shell_episode_is_converted() -> None:
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


def test_tool_calls_keep_ids_and_get_results(tmp_path: Path) -> None:
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
    path = tmp_path / "trajectory.json"
    write_atif(path, trajectory)
    assert read_prior_context(path) == freeze(history)


def test_rewritten_history_follows_the_format(tmp_path: Path) -> None:
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
    path = tmp_path / "trajectory.json"
    write_atif(path, trajectory)
    assert [message["content"] for message in read_prior_context(path)] == ["[user]\nGo.", "So far: nothing."]


def test_sliding_window_makes_a_bounded_document() -> None:
    texts = [f"{number} {'x' * 2000}" for number in range(60)]
    windows = [[{"role": "user", "content": text} for text in texts[at : at + 30]] for at in range(30)]
    steps = [record(at, window, LLMResponse.from_text("y") if at else None) for at, window in enumerate(windows)]
    document, _ = to_atif(episode(*steps))
    assert len(json.dumps(document)) < 60 * 2000 + 30 * 12_000


def test_changed_prompts_are_included() -> None:
    messages = [{"role": "user", "content": "Go."}]
    longer = [*messages, {"role": "assistant", "content": "a"}]
    trajectory = episode(
        record(0, messages, None, settings={"system_prompt": "A", "tools": [TOOL]}),
        record(1, longer, LLMResponse.from_text("a"), settings={"system_prompt": "B"}),
        record(2, longer, LLMResponse.from_text("b")),
    )
    document, _ = to_atif(trajectory)
    assert [step["message"] for step in document["steps"] if step["source"] == "system"][:2] == ["A", "B"]


def test_unequal_token_lists_and_media_are_omitted() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.PNG"}}
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, picture, inline]}]
    response = LLMResponse.from_text("ok", completion_token_ids=[1, 2], logprobs=[-0.5])
    trajectory = episode(record(0, messages, None), record(1, None, response))
    document, dropped = to_atif(trajectory)
    assert dropped == [PARTS]
    assert "logprobs" not in document["steps"][2]["metrics"]
    assert document["steps"][1]["message"] == [
        {"type": "text", "text": "See"},
        {"type": "image", "source": {"media_type": "image/png", "path": "https://example.org/a.PNG"}},
        {"type": "text", "text": "[image_url]"},
    ]
    assert document["steps"][2]["extra"]["ares_exp"]["action"] == {"logprobs": [-0.5]}


def test_lone_surrogate_is_replaced_and_reported() -> None:
    trajectory = episode(record(0, [{"role": "user", "content": "a\ud83d"}], None))
    document, dropped = to_atif(trajectory)
    assert dropped == [SURROGATES]
    assert document["steps"][1]["message"].startswith("a\ufffd")
    json.dumps(document, ensure_ascii=False).encode()


def test_foreign_observations_and_empty_episode_are_converted() -> None:
    steps = (
        StepRecord(0, "FIRST", {"board": [0, 1]}, None, None, None, 0.0),
        StepRecord(1, "LAST", None, {"move": 3}, 1.0, 0.0, 1.0),
    )
    document, dropped = to_atif(episode(*steps))
    assert dropped == [NO_CHAT]
    assert [step["message"] for step in document["steps"]] == ['{"board": [0, 1]}', '{"move": 3}']
    failed = episode(outcome=Outcome.CONTAINER_ERROR, error=ErrorInfo("ContainerStartError", "no image"))
    document, dropped = to_atif(failed)
    assert not dropped
    assert document["steps"] == [{"step_id": 1, "source": "system", "message": ""}]
    ours = document["extra"]["ares_exp"]
    assert (ours["outcome"], ours["error"]["message"]) == ("container_error", "no image")


def test_readable_reasoning_is_included() -> None:
    pieces = [ThinkingData("hm", "seal"), ThinkingData("Zm8=", redacted=True), TextData("I do 1.")]
    usage = Usage(9, 8, cached_tokens=3, reasoning_tokens=5)
    document = over_json(to_atif(with_response(chat(length=2), LLMResponse(pieces, usage=usage)))[0])
    [step] = [step for step in document["steps"] if "reasoning_content" in step]
    assert (step["reasoning_content"], step["metrics"]["cached_tokens"]) == ("hm", 3)
    assert document["final_metrics"]["total_cached_tokens"] == 3


def test_file_has_one_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "e1.atif.json"
    assert not write_atif(path, shell_episode())
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 4 + 1
    assert json.loads(path.read_text()) == to_atif(shell_episode())[0]
