"""Gymnasium spaces for chat requests (observations), chat responses (actions) and strings.

Importing this module imports gymnasium and numpy. `contains` only checks types, so its cost does not depend on the
length of a request. The spaces do not support sampling masks, flattening or shared memory. `AsyncVectorEnv` therefore
requires `shared_memory=False`. For libraries that need strings as observations and actions, use the wrappers of this
module:

```python
env = TextAction(TextObservation(gymnasium.make("ares_exp.gym:ares_exp/Harbor-v0", path="tasks")))
```

`info["time_step"].observation` still contains the full request.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any, Literal, TypeVar

import gymnasium
import numpy
from gymnasium.utils import RecordConstructorArgs

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import (
    LLMResponse,
    TextData,
    ThinkingData,
    ToolCallData,
    Usage,
    piece_from_dict,
    piece_to_dict,
)
from ares_exp.wrappers.chat_text import conversation_text, news_text

SAMPLE_ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
MAX_SAMPLE_CHARS = 64

MemberT = TypeVar("MemberT", LLMRequest, LLMResponse, str)


class _TypeSpace(gymnasium.Space[MemberT]):
    """Base class of the spaces. A space contains all values of one type, such as all strings."""

    def __init__(self, *, seed: int | numpy.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Always `False`, because text has no fixed size."""
        return False

    def __eq__(self, other: object) -> bool:
        """Returns whether both spaces have the same class. Ignores the states of their random generators."""
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]  # like Gymnasium's own spaces

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _sample_text(self, mask: Any, probability: Any) -> str:
        if mask is not None or probability is not None:
            raise ValueError(f"{self!r} supports no mask and no probability. Call sample() without arguments.")
        length = self.np_random.integers(1, MAX_SAMPLE_CHARS + 1)
        return "".join(SAMPLE_ALPHABET[i] for i in self.np_random.integers(len(SAMPLE_ALPHABET), size=length))


class LLMRequestSpace(_TypeSpace[LLMRequest]):
    """Space of all chat requests, which are the observations. It also contains other objects with a list `messages`."""

    def sample(self, mask: None = None, probability: None = None) -> LLMRequest:
        """Samples a request with one user message of 1 to 64 random characters. Raises `ValueError` for a mask."""
        return LLMRequest(messages=[{"role": "user", "content": self._sample_text(mask, probability)}])

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is an `LLMRequest`, or an object whose attribute `messages` is a list or a tuple."""
        return isinstance(x, LLMRequest) or isinstance(getattr(x, "messages", None), list | tuple)

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[dict[str, Any]]:
        """Converts requests to JSON-ready dicts. For other classes, keeps only the fields of `LLMRequest`."""
        names = [field.name for field in fields(LLMRequest)]
        values = ({name: getattr(one, name) for name in names if hasattr(one, name)} for one in sample_n)
        return [asdict(LLMRequest(**one)) for one in values]

    def from_jsonable(self, sample_n: list[dict[str, Any]]) -> list[LLMRequest]:
        """Converts the result of `to_jsonable` to requests of the class `LLMRequest`."""
        return [LLMRequest(**request) for request in sample_n]


class LLMResponseSpace(_TypeSpace[LLMResponse]):
    """Space of all LLM responses, which are the actions."""

    def sample(self, mask: None = None, probability: None = None) -> LLMResponse:
        """Samples a response with one text of 1 to 64 random characters. Raises `ValueError` if a mask is given."""
        return LLMResponse.from_text(self._sample_text(mask, probability))

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is an `LLMResponse` that consists of text, reasoning and tool calls."""
        known = TextData | ToolCallData | ThinkingData
        return isinstance(x, LLMResponse) and all(isinstance(piece, known) for piece in x.data)

    def to_jsonable(self, sample_n: Iterable[LLMResponse]) -> list[dict[str, Any]]:
        """Converts responses to data for `json.dumps` and `from_jsonable`."""
        return [asdict(response) | {"data": [*map(piece_to_dict, response.data)]} for response in sample_n]

    def from_jsonable(self, sample_n: list[dict[str, Any]]) -> list[LLMResponse]:
        """Converts the result of `to_jsonable` to responses."""
        return [
            LLMResponse(**{**one, "data": [*map(piece_from_dict, one["data"])], "usage": Usage(**one["usage"])})
            for one in sample_n
        ]


class TextSpace(_TypeSpace[str]):
    """Space of all strings. Unlike Gymnasium's `Text`, it includes newlines, accents and the empty string."""

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Samples a string of 1 to 64 random characters. Raises `ValueError` if a mask is given."""
        return self._sample_text(mask, probability)

    def contains(self, x: Any) -> bool:
        """Returns whether `x` is a string."""
        return isinstance(x, str)


_TEXTS = {"conversation": conversation_text, "news": news_text}


class TextObservation(gymnasium.ObservationWrapper[str, Any, LLMRequest], RecordConstructorArgs):
    """Converts each observation from a chat request to a string. After the end of an episode, the string is empty."""

    def __init__(
        self, env: gymnasium.Env[LLMRequest, Any], *, content: Literal["conversation", "news"] = "conversation"
    ) -> None:
        """Wraps `env`.

        Args:
            env: Environment whose observations are chat requests.
            content: `"conversation"` formats the system prompt and all messages, each after a line `[role]`, and
                separated by empty lines. `"news"` formats only the messages after the policy's last response, without
                `[role]` lines.

        Raises:
            ValueError: `content` has another value.
        """
        if content not in _TEXTS:
            raise ValueError(f"Expected content to be 'conversation' or 'news', got {content!r}.")
        RecordConstructorArgs.__init__(self, content=content)
        gymnasium.ObservationWrapper.__init__(self, env)
        self.observation_space = TextSpace()
        self._text = _TEXTS[content]

    def observation(self, observation: LLMRequest) -> str:
        """Formats the request as text."""
        return self._text(observation)


class TextAction(gymnasium.ActionWrapper[Any, str, LLMResponse], RecordConstructorArgs):
    """Converts each action from a string to an `LLMResponse`, whose token counts and cost are 0."""

    def __init__(self, env: gymnasium.Env[Any, LLMResponse]) -> None:
        RecordConstructorArgs.__init__(self)
        gymnasium.ActionWrapper.__init__(self, env)
        self.action_space = TextSpace()

    def action(self, action: str) -> LLMResponse:
        """Converts the string to a response. Raises `TypeError` if the action is not a string."""
        if not isinstance(action, str):
            raise TypeError(f"Expected a string for TextAction, got {type(action).__name__}. To pass an "
                            "LLMResponse, remove the wrapper.")  # fmt: skip
        return LLMResponse.from_text(action)
