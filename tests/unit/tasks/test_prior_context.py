from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import TaskError
from ares_exp.llms.request import freeze
from ares_exp.tasks.harbor import load_task
from ares_exp.tasks.prior_context import read_prior_context

MakeTask = Callable[..., Path]

USER = {"source": "user", "message": "Count the lines."}
CALL = {
    "source": "agent",
    "message": "Counting.",
    "tool_calls": [{"tool_call_id": "t1", "function_name": "sh", "arguments": {"cmd": "wc -l x"}}],
    "observation": {"results": [{"source_call_id": "t1", "content": "42 x"}]},
}
ANSWER = {"source": "agent", "message": "There are 42."}
TOLD = [
    {"role": "user", "content": "Count the lines."},
    {
        "role": "assistant",
        "content": "Counting.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "wc -l x"}'}}],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "42 x"},
]
SYSTEM = {"source": "system", "message": "You operate a shell."}


def document(*steps: dict[str, Any]) -> str:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return json.dumps({"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": numbered})


@pytest.mark.parametrize(
    ("steps", "messages"),
    [
        ([USER], TOLD[:1]),
        ([SYSTEM, USER, CALL], TOLD),
        ([SYSTEM, USER, CALL, ANSWER], [*TOLD, {"role": "assistant", "content": "There are 42."}]),
        ([USER, ANSWER, USER], [TOLD[0], {"role": "assistant", "content": "There are 42."}, TOLD[0]]),
    ],
)
def test_the_whole_conversation(tmp_path: Path, steps: list[dict[str, Any]], messages: list[Any]) -> None:
    (tmp_path / "trajectory.json").write_text(document(*steps))
    assert read_prior_context(tmp_path / "trajectory.json") == freeze(messages)


def test_one_that_was_recorded_here(tmp_path: Path) -> None:
    from ares_exp.llms.request import LLMRequest
    from ares_exp.llms.response import LLMResponse
    from ares_exp.records.results import Outcome
    from ares_exp.trajectories.atif.writer import write_atif
    from ares_exp.trajectories.records import (
        EpisodeTrajectory,
        StepRecord,
        serialize_llm_request,
        serialize_llm_response,
    )

    asked = serialize_llm_request(LLMRequest([TOLD[0]], system_prompt="You operate a shell."))
    answer = serialize_llm_response(LLMResponse.from_text("There are 42."))
    steps = (
        StepRecord(0, "FIRST", asked, None, None, None, 1.0),
        StepRecord(1, "LAST", None, answer, 1.0, 0.0, 2.0),
    )
    trajectory = EpisodeTrajectory(
        episode_id="e", task_name="t", steps=steps, start_time=1.0, end_time=2.0, total_reward=1.0, num_steps=1,
        truncated=False, outcome=Outcome.COMPLETED, metadata={},
    )  # fmt: skip
    write_atif(tmp_path / "trajectory.json", trajectory)
    assert read_prior_context(tmp_path / "trajectory.json") == (
        TOLD[0],
        {"role": "assistant", "content": "There are 42."},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n"agent": 7,\n,}', r"line 3 column 1"),
        (document(), r"steps: .*at least 1"),
        (document({"source": "user"}), r"steps\.0\.message"),
        ("[]", "valid ATIF document"),
    ],
)
def test_documents_that_are_none_are_found_before_the_start(make_task: MakeTask, text: str, said: str) -> None:
    task = load_task(make_task(files={"trajectory.json": text}))
    task.check_runnable()
    with pytest.raises(TaskError, match=rf"a-task/trajectory\.json: .*{said}"):
        task.check_runnable(supported=frozenset({"messages"}))


def test_of_several_steps_only_the_first_has_one(make_task: MakeTask) -> None:
    toml = "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'"
    files = {"steps/one/instruction.md": "", "steps/two/instruction.md": "", "trajectory.json": "broken"}
    assert load_task(make_task(toml=toml, files=files)).context.messages == ()
    files |= {"steps/one/trajectory.json": document(USER), "steps/two/trajectory.json": "broken"}
    assert load_task(make_task("other", toml, files)).context.messages == (TOLD[0],)
