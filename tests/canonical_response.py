from typing import Any

from ares_exp.llms.canonical import canonical_messages
from ares_exp.llms.chat_messages import assistant_message
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse


def canonical_response(response: LLMResponse, request: LLMRequest) -> dict[str, Any]:
    return canonical_messages(LLMRequest([*request.messages, assistant_message(response.data)]))[-1]
