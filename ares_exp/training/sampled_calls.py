"""The LLM calls of an episode as token ids: the prompt, the sampled tokens, and their log-probabilities.

A call is rejected if its record does not prove that its tokens were sampled from the policy's own distribution. For
example, token ids or log-probabilities are missing, or their lists differ in length. Other reasons are sampling
parameters that change the distribution: truncation such as `top_p`, a penalty, or a grammar. Prompts with media are
also rejected, because token ids do not represent media.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import UntrainableError
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING, PROCESSED_LOGPROBS
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, conversation_of

MAX_LOGPROB = 1e-3
"""Maximum log-probability: 0, plus a tolerance for rounding."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in NEUTRAL_SAMPLING.items() if name != "temperature"},
    "top_k": (0, -1),
    "typical_p": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ((), []),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), ()),
}
"""Parameters that can change the sampling distribution, each with the values (besides `None`) that do not change it."""

_MEDIA = ("image", "image_url", "input_image", "input_audio", "audio", "video", "video_url", "file", "input_file")


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One LLM call of an episode, as token ids.

    Attributes:
        step: `step_index` of the call's step. For a background request, the step during which it was sent.
        conversation: Conversation of the call.
        prompt: Token ids of the prompt.
        completion: Sampled token ids.
        logprobs: Log-probability of each sampled token at sampling.
        policy_version: Version of the weights; `None` if unknown.
        finish_reason: Reason why the response ended; `None` if unknown.
        states_sampling: Whether the record shows how the tokens were sampled: it contains the temperature, and no
            sampling parameter is `null`. With `null`, the engine chooses the value, which is then unknown.
    """

    step: int
    conversation: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: str | None = None
    finish_reason: str | None = None
    states_sampling: bool = True


@dataclass(frozen=True, slots=True)
class Accepted:
    """The conditions that a call must meet to be trained on.

    Attributes:
        conversations: Names of conversations, or patterns such as `sub-*`.
        temperature: Required sampling temperature, which must be the trainer's temperature; `None` accepts any.
        altered_sampling: Whether to accept calls with a sampling parameter that changes the distribution (`NEUTRAL`).
            Training is then off-policy.
    """

    conversations: Collection[str] = (MAIN_CONVERSATION,)
    temperature: float | None = 1.0
    altered_sampling: bool = False

    def __post_init__(self) -> None:
        """Rejects a string for `conversations`, which would be treated as a list of its characters."""
        if isinstance(self.conversations, str):
            raise ValueError(
                f"Expected `conversations` to be a list of names or patterns, got {self.conversations!r}. "
                f"Use [{self.conversations!r}]."
            )

    def takes(self, conversation: str) -> bool:
        """Returns whether a conversation is trained on."""
        return any(fnmatchcase(conversation, pattern) for pattern in self.conversations)


def distinct_versions(recorded: Iterable[str | None]) -> tuple[str, ...]:
    """Returns the versions of the weights in recorded `policy_version` fields, in order of first use.

    If the weights changed during a response, its `policy_version` has several versions, joined by `+`.
    """
    return tuple(dict.fromkeys(one for names in recorded if names for one in names.split("+")))


def conversations_of(episode: EpisodeTrajectory) -> list[str]:
    """Returns the name of the conversation of each call of an episode, in the order of the calls."""
    return [conversation_of(request) for request, _ in _exchanges(episode)]


def calls_of(episode: EpisodeTrajectory, accepted: Accepted) -> Iterator[SampledCall]:
    """Yields the calls of the accepted conversations in the order of their responses, including background requests.

    Raises:
        UntrainableError: The record of a call does not prove that its tokens were sampled from the policy. The message
            names the call and the reason.
    """
    for request, answered in _exchanges(episode):
        if accepted.takes(conversation := conversation_of(request)):
            yield _Reader(episode, answered, answered.action or {}, request, accepted).read(conversation)


def _exchanges(episode: EpisodeTrajectory) -> Iterator[tuple[Mapping[str, Any], StepRecord]]:
    for asked, answered in zip((None, *episode.steps), episode.steps, strict=False):
        if asked is not None and answered.action is not None:
            yield asked.observation if isinstance(asked.observation, Mapping) else {}, answered
        for background_request in answered.background_requests:
            yield background_request.request, replace(answered, action=background_request.response)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts one recorded call to a `SampledCall`. Raises `UntrainableError` if the call is rejected."""

    episode: EpisodeTrajectory
    answered: StepRecord
    action: Mapping[str, Any]
    request: Mapping[str, Any]
    accepted: Accepted

    def read(self, conversation: str) -> SampledCall:
        prompt = self._list("prompt_token_ids", "ids", _is_id)
        completion = self._list("completion_token_ids", "ids", _is_id)
        logprobs = self._list("logprobs", "log-probabilities", _is_logprob)
        if len(logprobs) != len(completion):
            self._refuse(f"has {len(completion)} sampled tokens and {len(logprobs)} log-probabilities")
        if not prompt or not completion:
            self._refuse(f"has {len(prompt)} prompt tokens and {len(completion)} sampled tokens, but needs both")
        if kinds := sorted(set(_media(self.request))):
            self._refuse(f"belongs to a request with content that token ids do not represent ({', '.join(kinds)})")
        recorded = self.action.get("sampling")
        sampling: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else self.request
        if (altered := self._altered(sampling)) is not None:
            self._refuse(altered)
        return SampledCall(
            step=self.answered.step_index,
            conversation=conversation,
            prompt=tuple(prompt),
            completion=tuple(completion),
            logprobs=tuple(map(float, logprobs)),
            policy_version=_text(self.action.get("policy_version")),
            finish_reason=_text(self.action.get("finish_reason")),
            states_sampling=sampling.get("temperature") is not None and not _left_to_engine(recorded),
        )

    def _list(self, name: str, items: str, is_item: Callable[[Any], bool]) -> Sequence[Any]:
        """Returns a field of the response, which must be a list of `items`."""
        values = self.action.get(name)
        if values is None:
            self._refuse(f"has no `{name}`: policy=transformers, policy=vllm and policy=sglang provide them")
        if not _is_list(values) or not all(map(is_item, values)):
            self._refuse(f"has invalid `{name}`, which must be a list of {items}: {values!r:.60}")
        return values

    def _altered(self, sampling: Mapping[str, Any]) -> str | None:
        expected = self.accepted.temperature
        temperature = sampling.get("temperature")
        if expected is not None and temperature is not None and temperature != expected:
            return (
                f"was sampled at temperature {temperature}, expected {expected:g}. Sample at this "
                "temperature (`policy.temperature`), or pass the trainer's temperature (`temperature=`)"
            )
        if self.accepted.altered_sampling:
            return None
        remedy = "leave it out, or accept such calls with `altered_sampling`"
        if temperature not in (None, 1) and not PROCESSED_LOGPROBS.items() <= sampling.items():
            return (
                f"was sampled at temperature {temperature}, but its log-probabilities may be those "
                "of temperature 1. Start vLLM with `--logprobs-mode processed_logprobs`, and use policy=vllm, "
                "which checks it"
            )
        for name, neutral in NEUTRAL.items():
            if (value := sampling.get(name)) is not None and value not in neutral:
                return f"was sampled with `{name}={value!r:.40}`, not from the policy's own distribution: {remedy}"
        if (choice := self.request.get("tool_choice")) not in (None, "auto", "none"):
            return f"had to call a tool (`tool_choice={choice!r:.40}`), so a grammar restricted its tokens: {remedy}"
        return None

    def _refuse(self, why: str) -> NoReturn:
        model = _text(self.action.get("model"))
        by = f" by {model}" if model else ""
        episode = f"episode {self.episode.episode_id} ({self.episode.task_name})"
        raise UntrainableError(f"The response{by} at step {self.answered.step_index} of {episode} {why}.")


def _media(request: Mapping[str, Any]) -> Iterator[str]:
    """Yields the type of each media part in a request, such as `image_url`."""
    for message in _mappings(request.get("messages")):
        for part in _mappings(message.get("content")):
            if (kind := part.get("type")) in _MEDIA:
                yield kind


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if _is_list(values) else []


def _left_to_engine(recorded: Any) -> bool:
    """Returns whether a request set a sampling parameter to `null`, so that the engine chose its value."""
    return isinstance(recorded, Mapping) and any(name in recorded and recorded[name] is None for name in NEUTRAL)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value <= MAX_LOGPROB


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
