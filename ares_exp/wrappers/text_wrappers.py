"""Gymnasium wrappers for libraries that want plain strings: `TextObservation` and `TextAction`.

```python
env = TextAction(TextObservation(gymnasium.make("ares_exp.gym:ares_exp/Harbor-v0", path="tasks")))
```

Both keep what is lost in a string within reach: `info["time_step"].observation` is the whole request.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.wrappers.chat_text import conversation_text, news_text
from ares_exp.wrappers.spaces import TextSpace

_TEXTS = {"conversation": conversation_text, "news": news_text}


class TextObservation(gymnasium.ObservationWrapper[str, Any, LLMRequest], RecordConstructorArgs):
    """Shows each chat request as one string; the observation of an ended episode is the empty string."""

    def __init__(
        self, env: gymnasium.Env[LLMRequest, Any], *, content: Literal["conversation", "news"] = "conversation"
    ) -> None:
        """Wraps `env`.

        Args:
            env: Its observations are chat requests.
            content: `"conversation"`: system prompt and all messages, each under a line `[role]`, an empty line between
                them. `"news"`: only the messages since the policy's last answer, without those lines.

        Raises:
            ValueError: `content` is neither.
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
    """Takes each action as a string: the text of an `LLMResponse` without usage or cost."""

    def __init__(self, env: gymnasium.Env[Any, LLMResponse]) -> None:
        """Wraps `env`, whose actions are chat responses."""
        RecordConstructorArgs.__init__(self)
        gymnasium.ActionWrapper.__init__(self, env)
        self.action_space = TextSpace()

    def action(self, action: str) -> LLMResponse:
        """Wraps the string in a response.

        Raises:
            TypeError: It is no string.
        """
        if not isinstance(action, str):
            raise TypeError(f"Expected a string for TextAction, got {type(action).__name__}. Leave the wrapper out to "
                            "give an LLMResponse.")  # fmt: skip
        return LLMResponse.from_text(action)
