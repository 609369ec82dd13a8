"""Hypothesis strategies for trajectories: what the agents of this package make, and what a stranger may record.

`linear_trajectories()`: every request is the one before, the reply to it, and new messages; settings never change.
`rewritten_trajectories()`: agents that drop, edit, summarise and interleave, and change their settings.
`foreign_trajectories()`: observations and actions that are any JSON object. `trajectories()`: all of them.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Piece, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)

ODD_TEXTS = (
    "",
    " ",
    "null",
    "\x00\x1b[31m\x7f",
    "a\r\nb\u2028c\u0085d\n",
    "\ufeff\u202eabc\U0001f9ea é e\u0301",
    '{"type": "step"}',
    "],\n{",
    "```bash\nls -l 'a b'\n```\n",
    "long enough to be shared between a reply and the message it becomes " * 2,
)
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=12)
numbers = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 0.1 + 0.2, 1e-300])
seconds = st.floats(0, 1e5)
times = st.floats(0, 4e9) | st.just(1767603600.1234567)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
contents = texts | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, texts) | st.just(PICTURE), max_size=2
)
request_settings = st.fixed_dictionaries(
    {},
    optional={
        "system_prompt": texts,
        "tools": st.lists(st.just(TOOL), min_size=1, max_size=2),
        "tool_choice": st.sampled_from(["auto", {"type": "function", "function": {"name": "run"}}]),
        "temperature": st.floats(0, 2),
        "max_output_tokens": st.integers(1, 9999),
        "stop_sequences": st.lists(texts, max_size=2),
        "metadata": json_objects,
    },
)
commands = st.builds(CommandRecord, texts, st.none() | st.integers(0, 255), seconds, st.booleans())
errors = st.builds(ErrorInfo, texts, texts)
Messages = list[dict[str, Any]]
Rewrite = Callable[[st.DrawFn, Messages], Messages]


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """What a model answers: now and then reasoning, mostly one text, then maybe tool calls; rarely anything else."""
    thoughts = st.builds(ThinkingData, texts.filter(bool), st.none() | texts, st.booleans())
    thinking = draw(st.just([]) | st.lists(thoughts | texts.filter(bool).map(ThinkingData), max_size=2))
    return [*thinking, *draw(said_pieces())]


@st.composite
def said_pieces(draw: st.DrawFn) -> list[Piece]:
    """What a model says to others."""
    text = [TextData(draw(texts))]
    calls = [
        ToolCallData(
            draw(texts) or f"call_{number}", "run", draw(st.sampled_from(['{"command": "ls"}', "{}", "{oops"]))
        )
        for number in range(draw(st.sampled_from([0, 0, 1, 2])))
    ]
    return draw(st.sampled_from([[*text, *calls], [*text, *calls], calls or text, [*calls, *text, *text]]))


@st.composite
def responses(draw: st.DrawFn, prompt: list[int] | None) -> LLMResponse:
    """A response; with token ids where those of its prompt are given."""
    tokens = None if prompt is None else draw(st.lists(st.integers(0, 200_000), max_size=20))
    return LLMResponse(
        draw(pieces()),
        cost=draw(st.sampled_from([0.0, 0.0012])),
        usage=Usage(
            draw(st.integers(0, 9999)),
            draw(st.integers(0, 9999)) if tokens is None else len(tokens),
            *draw(st.just(()) | st.tuples(*[st.integers(0, 9)] * 3)),
        ),
        prompt_token_ids=prompt,
        completion_token_ids=tokens,
        logprobs=tokens and [-(token % 7) / 8 for token in tokens],
        finish_reason=draw(st.sampled_from([None, "stop", "length", "tool_calls"])),
        model=draw(st.sampled_from([None, "local/tiny", "local/other"])),
        latency_sec=draw(st.none() | seconds),
        policy_version=draw(st.sampled_from([None, "3"])),
        activations=draw(st.sampled_from([None, {"layer": {"file": "activations/a.npy", "rows": 2}}])),
    )


@st.composite
def new_messages(draw: st.DrawFn, response: LLMResponse) -> Messages:
    """What a linear agent appends after a response: the response itself, what its tools said, and what users say."""
    reply: dict[str, Any] = {"role": "assistant", "content": response.text}
    calls = [piece for piece in response.data if isinstance(piece, ToolCallData)]
    if calls:
        reply["content"] = response.text or draw(st.sampled_from([None, ""]))
        reply["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    shown = [{"role": "tool", "tool_call_id": call.id, "content": draw(contents)} for call in calls]
    said = draw(st.lists(contents, max_size=2 if calls else 3))
    return [reply, *shown, *({"role": "user", "content": content} for content in said)]


def keep(_: st.DrawFn, messages: Messages) -> Messages:
    return messages


def rewrite(draw: st.DrawFn, messages: Messages) -> Messages:
    """The history as an agent that manages its context, or leads two conversations, sends it."""
    at = draw(st.integers(0, len(messages)))
    summary = {"role": "user", "content": f"So far: {at}", "name": "summary"}
    return draw(
        st.sampled_from(
            [
                messages,
                messages[at:],
                messages[:at],
                [summary, *messages[at:]],
                [*messages[:at], summary, *messages[at + 1 :]],
                [*messages[:at], *messages],
            ]
        )
    )


@st.composite
def _episodes(draw: st.DrawFn, rewrite: Rewrite, *, steady: bool) -> EpisodeTrajectory:
    said = request_settings if steady else request_settings | st.just({"system_prompt": "You changed."})
    options = draw(request_settings)
    messages = draw(st.lists(st.builds(lambda content: {"role": "user", "content": content}, contents), max_size=2))
    length = draw(st.integers(0, 5))
    reached_end = length > 1 and draw(st.booleans())
    tokens = draw(st.none() | st.lists(st.integers(0, 200_000), max_size=30))
    requests, given = [], []
    for _ in range(length):
        sent = rewrite(draw, messages)
        options = options if steady else draw(st.just(options) | said)
        requests.append(serialize_llm_request(LLMRequest(sent, **options)))
        response = draw(responses(None if tokens is None else list(tokens)))
        given.append(serialize_llm_response(response))
        messages = [*messages, *draw(new_messages(response))]
        if tokens is not None:
            tokens = [*tokens, *(response.completion_token_ids or ()), len(tokens)]
    return draw(_whole(requests, given, reached_end=reached_end))


unfinished_steps = st.builds(
    StepRecord,
    step_index=st.integers(0, 9),
    step_type=st.just("MID"),
    observation=st.none(),
    action=st.none() | json_objects | responses(None).map(serialize_llm_response),
    reward=st.none(),
    discount=st.none(),
    timestamp=times,
    environment_sec=seconds,
    commands=st.lists(commands, max_size=2).map(tuple),
)


@st.composite
def _whole(draw: st.DrawFn, observations: list[Any], actions: list[Any], *, reached_end: bool) -> EpisodeTrajectory:
    """An episode of these; action k follows observation k."""
    steps = []
    for number, observation in enumerate(observations):
        first, last = number == 0, reached_end and number == len(observations) - 1
        steps.append(
            StepRecord(
                step_index=number,
                step_type="FIRST" if first else "LAST" if last else "MID",
                observation=None if last else observation,
                action=None if first else actions[number - 1],
                reward=None if first else draw(st.none() | st.just(0.0) | numbers),
                discount=None if first else draw(st.sampled_from([0.0, 1.0] if last else [1.0, 0.99])),
                timestamp=draw(times),
                policy_sec=None if first else draw(st.none() | seconds),
                environment_sec=draw(st.none() | seconds),
                container_sec=draw(st.none() | seconds),
                commands=tuple(draw(st.lists(commands, max_size=2))),
            )
        )
    outcome = draw(st.sampled_from([Outcome.COMPLETED, Outcome.TRUNCATED] if reached_end else Outcome))
    return EpisodeTrajectory(
        episode_id=draw(st.uuids()).hex,
        task_name=draw(texts),
        steps=tuple(steps),
        start_time=draw(times),
        end_time=draw(times),
        total_reward=total_reward(steps),
        num_steps=len(steps),
        truncated=outcome is Outcome.TRUNCATED,
        outcome=outcome,
        error=draw(st.none() | errors),
        metadata=draw(json_objects),
        unfinished_step=draw(st.none() | unfinished_steps),
    )


def linear_trajectories() -> st.SearchStrategy[EpisodeTrajectory]:
    """Episodes of an agent that only ever appends."""
    return _episodes(keep, steady=True)


def rewritten_trajectories() -> st.SearchStrategy[EpisodeTrajectory]:
    """Episodes of an agent that changes its history and its settings."""
    return _episodes(rewrite, steady=False)


@st.composite
def foreign_trajectories(draw: st.DrawFn) -> EpisodeTrajectory:
    """Episodes of somebody else's environment, whose observations and actions are any JSON objects."""
    like_ours = st.fixed_dictionaries(
        {},
        optional={"messages": json_values, "conversation": json_values, "verbatim": json_values, "data": json_values},
    )
    values = json_objects | like_ours
    length = draw(st.integers(1, 4))
    observations = draw(st.lists(values, min_size=length, max_size=length))
    actions = draw(st.lists(values, min_size=length, max_size=length))
    return draw(_whole(observations, actions, reached_end=length > 1 and draw(st.booleans())))


def trajectories() -> st.SearchStrategy[EpisodeTrajectory]:
    return linear_trajectories() | rewritten_trajectories() | foreign_trajectories()
