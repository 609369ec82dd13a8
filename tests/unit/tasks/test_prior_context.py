from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.errors import TaskError
from ares_exp.llms.request import freeze
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.instruction import read_prior_context
from tests.examples import examples
from tests.unit.trajectories.atif_examples import counting
from tests.unit.trajectories.strategies import json_values

MakeTask = Callable[..., Path]

USER = {"source": "user", "message": "Count the lines."}
CALL = {
    "source": "agent",
    "message": "Counting.",
    "tool_calls": [{"tool_call_id": "t1", "function_name": "sh", "arguments": {"cmd": "wc -l x"}}],
    "observation": {"results": [{"source_call_id": "t1", "content": "42 x"}]},
}
RESPONSE = {"source": "agent", "message": "There are 42."}
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
REPLACED = {
    "source": "system",
    "message": "Rewritten.",
    "observation": {"results": [{"content": "So far."}]},
    "extra": {"context_management": {"type": "rewrite", "boundary": "replace"}},
}
PARTS = [{"type": "text", "text": "See"}, {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
AUDIO = [{"type": "audio", "source": {"media_type": "audio/wav", "path": "a.wav"}}]


def document(*steps: dict[str, Any]) -> str:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return json.dumps({"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": numbered})


@pytest.mark.parametrize(
    ("steps", "messages"),
    [
        ([USER], TOLD[:1]),
        ([SYSTEM, USER, CALL], TOLD),
        ([SYSTEM, USER, CALL, RESPONSE], [*TOLD, {"role": "assistant", "content": "There are 42."}]),
        ([USER, RESPONSE, USER], [TOLD[0], {"role": "assistant", "content": "There are 42."}, TOLD[0]]),
        ([USER, {**CALL, "is_copied_context": True}], TOLD),
        ([USER, {**CALL, "llm_call_count": 0}], TOLD),
        ([USER, SYSTEM], [TOLD[0], {"role": "system", "content": "You operate a shell."}]),
        ([SYSTEM, USER, RESPONSE, REPLACED, USER], [{"role": "user", "content": "So far."}, TOLD[0]]),
        (
            [{**USER, "message": PARTS}, {**RESPONSE, "message": PARTS}, {**USER, "message": AUDIO}],
            [
                {"role": "user", "content": [PARTS[0], {"type": "image_url", "image_url": {"url": "a.png"}}]},
                {"role": "assistant", "content": "See"},
                {"role": "user", "content": [{"type": "text", "text": "[audio: a.wav]"}]},
            ],
        ),
    ],
)
def test_the_whole_conversation(tmp_path: Path, steps: list[dict[str, Any]], messages: list[Any]) -> None:
    (tmp_path / "trajectory.json").write_text(document(*steps))
    assert read_prior_context(tmp_path / "trajectory.json") == freeze(messages)


def test_one_that_was_recorded_here(tmp_path: Path) -> None:
    from ares_exp.llms.request import LLMRequest
    from ares_exp.llms.response import LLMResponse
    from ares_exp.records.results import Outcome
    from ares_exp.trajectories.exports.atif_writer import write_atif
    from ares_exp.trajectories.records import (
        EpisodeTrajectory,
        StepRecord,
        serialize_llm_request,
        serialize_llm_response,
    )

    asked = serialize_llm_request(LLMRequest([TOLD[0]], system_prompt="You operate a shell."))
    response = serialize_llm_response(LLMResponse.from_text("There are 42."))
    steps = (
        StepRecord(0, "FIRST", asked, None, None, None, 1.0),
        StepRecord(1, "LAST", None, response, 1.0, 0.0, 2.0),
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
        (document(), r"steps.*at least 1"),
        (document({"source": "user"}), r"steps\.0\.message"),
        ("[]", "valid ATIF document"),
        ("", "line 1 column 1"),
        ('{"agent": ' * 100_000, "nested too deeply"),
        (document(SYSTEM), "found no message"),
    ],
)
def test_documents_that_are_none_are_found_before_the_start(make_task: MakeTask, text: str, said: str) -> None:
    task = load_task(make_task(files={"trajectory.json": text}))
    task.check_runnable()
    with pytest.raises(TaskError, match=rf"a-task/trajectory\.json: .*{said}"):
        task.check_runnable(supported=frozenset({"messages"}))


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_document_with_a_thing_replaced_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    replaced = copy.deepcopy(counting())
    inner: Any = replaced
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.integers(0, 4)) == 0:
            break
        inner = inner[key]
    inner[key] = data.draw(json_values)
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(replaced))
    with contextlib.suppress(TaskError):  # any other error is a defect
        read_prior_context(path)


def test_of_several_steps_only_the_first_has_one(make_task: MakeTask) -> None:
    toml = "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'"
    files = {"steps/one/instruction.md": "", "steps/two/instruction.md": "", "trajectory.json": "broken"}
    assert load_task(make_task(toml=toml, files=files)).context.messages == ()
    files |= {"steps/one/trajectory.json": document(USER), "steps/two/trajectory.json": "broken"}
    assert load_task(make_task("other", toml, files)).context.messages == (TOLD[0],)
