"""The canonical form of the message that repeats an answer."""

from typing import Any

from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import assistant_message
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse


def canonical_answer(response: LLMResponse, request: LLMRequest) -> dict[str, Any]:
    """The last message of a request that repeats an answer to `request`."""
    return canonical_messages(LLMRequest([*request.messages, assistant_message(response.data)]))[-1]
