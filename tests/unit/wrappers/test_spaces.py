import json
import pickle

import pytest
from gymnasium.spaces import Tuple
from gymnasium.vector.utils import batch_space

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.wrappers.spaces import LLMRequestSpace, LLMResponseSpace, TextSpace

SPACES = [LLMRequestSpace, LLMResponseSpace, TextSpace]
FULL_REQUEST = LLMRequest(
    messages=[
        {"role": "user", "content": "grüß\n dich"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ],
    max_output_tokens=5,
    temperature=0.5,
    tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    tool_choice={"type": "function"},
    metadata={"a": [1, {"b": None}]},
    stop_sequences=["END"],
    system_prompt="be brief",
    top_k=3,
)
FULL_RESPONSE = LLMResponse(
    data=[ThinkingData("hm", "seal"), TextData("text"), ToolCallData("1", "f", '{"x": 1}')],
    cost=0.25,
    usage=Usage(10, 3, reasoning_tokens=2),
    completion_token_ids=[1, 2, 3],
    logprobs=[-0.5, -0.25, -1.0],
    finish_reason="tool_calls",
    model="m",
    latency_sec=0.1,
    policy_version="3",
    activations={"layer": {"file": "activations/a.npy", "rows": 2}},
)


@pytest.mark.parametrize("space_class", SPACES)
def test_samples_are_members_and_follow_the_seed(space_class):
    space, again = space_class(seed=7), space_class()
    again.seed(7)
    samples = [space.sample() for _ in range(20)]
    assert all(sample in space for sample in samples)
    assert samples == [again.sample() for _ in range(20)]
    assert len({repr(sample) for sample in samples}) == 20


@pytest.mark.parametrize("space_class", SPACES)
@pytest.mark.parametrize("argument", ["mask", "probability"])
def test_sampling_takes_no_mask(space_class, argument):
    with pytest.raises(ValueError, match="takes no sampling mask"):
        space_class().sample(**{argument: (1, None)})


def test_membership_is_a_matter_of_type():
    assert FULL_REQUEST in LLMRequestSpace()
    assert FULL_RESPONSE in LLMResponseSpace()
    assert LLMResponse(data=()) in LLMResponseSpace()
    for stranger in ("text", None, {"messages": []}, FULL_RESPONSE):
        assert stranger not in LLMRequestSpace()
    for stranger in (b"bytes", None, 7, ["text"]):
        assert stranger not in TextSpace()
    for stranger in ("text", None, FULL_REQUEST, LLMResponse(data=["bare text"])):
        assert stranger not in LLMResponseSpace()


@pytest.mark.parametrize(
    ("space", "record"),
    [(LLMRequestSpace(), FULL_REQUEST), (LLMResponseSpace(), FULL_RESPONSE), (TextSpace(), "grüß\n dich \ud800")],
)
def test_records_survive_json(space, record):
    batch = [record, space.sample()]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(batch)))) == batch


def test_spaces_of_a_kind_are_equal():
    assert LLMRequestSpace(seed=1) == LLMRequestSpace()
    assert LLMRequestSpace() != LLMResponseSpace()
    for space_class in SPACES:
        assert pickle.loads(pickle.dumps(space_class(seed=1))) == space_class()


@pytest.mark.parametrize("space_class", SPACES)
def test_spaces_are_not_arrays(space_class):
    space = space_class()
    assert (space.shape, space.dtype, space.is_np_flattenable) == (None, None, False)
    batched = batch_space(space, 2)
    assert isinstance(batched, Tuple)
    assert batched.sample() in batched
