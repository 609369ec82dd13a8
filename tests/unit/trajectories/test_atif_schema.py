from typing import Any

import pytest

from ares_exp.errors import TrajectoryFormatError
from ares_exp.trajectories.exports.atif_schema import VERSIONS, validate_atif
from tests.unit.trajectories.atif_examples import at, counting, smallest

STEP: dict[str, Any] = {"step_id": 1, "source": "user", "message": "x"}
INNER = smallest() | {"trajectory_id": "inner"}
PNG = {"media_type": "image/png", "path": "a.png"}
MP3 = {"media_type": "audio/mp3", "path": "a.mp3", "duration_sec": 1.5}


@pytest.mark.parametrize("document", [smallest(), counting()])
def test_the_examples_are_valid(document: dict[str, Any]) -> None:
    validate_atif(document)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_may_have_every_field(version: str) -> None:
    validate_atif(counting() | {"schema_version": version})


def test_a_missing_version_is_the_newest() -> None:
    document = counting()
    del document["schema_version"]
    validate_atif(document)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("steps.1.message", ""),
        ("steps.1.message", []),
        ("steps.1.message", [{"type": "text", "text": ""}, {"type": "image", "source": PNG}]),
        ("steps.1.message", [{"type": "audio", "source": MP3}]),
        ("steps.1.observation", {"results": [{"content": "seen"}]}),
        ("steps.1.is_copied_context", True),
        ("steps.1.llm_call_count", 0),
        ("steps.1.tool_calls", None),
        ("steps.1.timestamp", "2026-01-05"),
        ("steps.1.timestamp", "2026-01-05 09:00:00"),
        ("steps.1.timestamp", "20260105T090000"),
        ("steps.3.reasoning_effort", 0.5),
        ("steps.3.reasoning_effort", "high"),
        ("steps.3.extra", {"any": [{"thing": None}]}),
        ("steps.2.observation.results.0.source_call_id", None),
        ("steps.2.observation.results.0.subagent_trajectory_ref", [{"trajectory_id": "nowhere"}]),
        ("steps.2.metrics.prompt_tokens", None),
        ("agent.tool_definitions", [{"anything": 1}]),
        ("final_metrics.total_steps", 77),
        ("steps.2.metrics.logprobs", [-0.1]),
        ("subagent_trajectories", [INNER | {"trajectory_id": "root"}]),
    ],
)
def test_what_the_rules_allow(place: str, value: Any) -> None:
    validate_atif(at(counting(), place, value))


def test_tool_call_ids_may_repeat() -> None:
    document = counting()
    document["steps"][2]["tool_calls"] *= 2
    validate_atif(document)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("schema_version", "ATIF-v1.9", "schema_version"),
        ("schema_version", None, "schema_version"),
        ("surprise", 1, "surprise"),
        ("agent", None, "agent"),
        ("agent.name", 7, "agent.name"),
        ("agent.version", None, "agent.version"),
        ("agent.surprise", 1, "agent.surprise"),
        ("agent.tool_definitions", ["x"], "agent.tool_definitions.0"),
        ("steps", [], "steps"),
        ("steps", {"0": STEP}, "steps"),
        ("steps.0", "x", "steps.0"),
        ("steps.0.surprise", 1, "steps.0.surprise"),
        ("steps.0.step_id", 0, "steps.0.step_id"),
        ("steps.0.step_id", "1", "steps.0.step_id"),
        ("steps.0.step_id", True, "steps.0.step_id"),
        ("steps.1.step_id", 3, "got 3 in place of 2"),
        ("steps.0.source", "assistant", "steps.0.source"),
        ("steps.0.message", None, "steps.0.message"),
        ("steps.0.message", {"text": "x"}, "steps.0.message"),
        ("steps.0.message", [{"type": "text"}], "text"),
        ("steps.0.message", [{"type": "text", "text": "x", "source": PNG}], "source"),
        ("steps.0.message", [{"type": "image", "text": "x", "source": PNG}], "text"),
        ("steps.0.message", [{"type": "image"}], "source"),
        ("steps.0.message", [{"type": "image", "source": MP3}], "media_type"),
        ("steps.0.message", [{"type": "audio", "source": PNG}], "media_type"),
        ("steps.0.message", [{"type": "audio", "source": MP3 | {"duration_sec": -1}}], "duration_sec"),
        ("steps.0.message", [{"type": "image", "source": PNG | {"media_type": "image/tiff"}}], "media_type"),
        ("steps.0.message", [{"type": "video", "source": PNG}], "video"),
        ("steps.1.timestamp", "yesterday", "steps.1.timestamp"),
        ("steps.1.timestamp", 1767603600, "steps.1.timestamp"),
        ("steps.0.llm_call_count", -1, "steps.0.llm_call_count"),
        ("steps.0.is_copied_context", "true", "steps.0.is_copied_context"),
        ("steps.0.extra", [], "steps.0.extra"),
        ("steps.0.tool_calls", [], "`tool_calls` on agent steps only, got it on a system step"),
        ("steps.1.metrics", {}, "`metrics` on agent steps only, got it on a user step"),
        ("steps.1.model_name", "m", "`model_name` on agent steps only"),
        ("steps.1.reasoning_content", "m", "`reasoning_content` on agent steps only"),
        ("steps.1.reasoning_effort", "low", "`reasoning_effort` on agent steps only"),
        ("steps.2.llm_call_count", 0, "where `llm_call_count` is 0"),
        ("steps.2.tool_calls.0.tool_call_id", None, "tool_call_id"),
        ("steps.2.tool_calls.0.arguments", '{"cmd": "ls"}', "arguments"),
        ("steps.2.tool_calls.0.surprise", 1, "surprise"),
        ("steps.2.tool_calls", [], "got `source_call_id` 't1'"),
        ("steps.2.observation", {}, "results"),
        ("steps.2.observation.results.0.source_call_id", "t2", "got `source_call_id` 't2'"),
        ("steps.3.observation", {"results": [{"source_call_id": "t1"}]}, "got `source_call_id` 't1'"),
        ("steps.2.observation.results.0.surprise", 1, "surprise"),
        ("steps.2.observation.results.0.subagent_trajectory_ref", [{"session_id": "s"}], "`trajectory_path`"),
        ("steps.2.observation.results.0.subagent_trajectory_ref", {"trajectory_id": "s"}, "subagent_trajectory_ref"),
        ("steps.2.metrics.prompt_tokens", "4", "prompt_tokens"),
        ("steps.2.metrics.cost_usd", "0.1", "cost_usd"),
        ("steps.2.metrics.logprobs", [-0.1, None, -0.2], "logprobs.1"),
        ("steps.2.metrics.completion_token_ids", [21, 22.5, 23], "completion_token_ids.1"),
        ("final_metrics.total_steps", -1, "total_steps"),
        ("final_metrics.total_cost", 1, "total_cost"),
        ("subagent_trajectories", [smallest()], "`trajectory_id` that its siblings have not"),
        ("subagent_trajectories", [INNER, INNER], "`trajectory_id` that its siblings have not"),
        ("subagent_trajectories", [at(INNER | {"steps": [dict(STEP)]}, "steps.0.step_id", 5)], "got 5 in place of 1"),
        ("notes", ["x"], "notes"),
    ],
)
def test_what_the_rules_forbid_is_told_with_its_place(place: str, value: Any, told: str) -> None:
    with pytest.raises(TrajectoryFormatError) as caught:
        validate_atif(at(counting(), place, value))
    assert told in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("missing", ["agent", "steps"])
def test_what_a_document_must_have(missing: str) -> None:
    document = smallest()
    del document[missing]
    with pytest.raises(TrajectoryFormatError, match=missing):
        validate_atif(document)


@pytest.mark.parametrize("document", [None, [], "ATIF", 1, {}])
def test_what_is_no_document(document: Any) -> None:
    with pytest.raises(TrajectoryFormatError, match="Expected a valid ATIF document"):
        validate_atif(document)


def test_trajectories_within_trajectories_without_end_are_refused() -> None:
    document = smallest()
    for _ in range(100_000):
        document = smallest() | {"trajectory_id": "t", "subagent_trajectories": [document]}
    with pytest.raises(TrajectoryFormatError):
        validate_atif(document)
