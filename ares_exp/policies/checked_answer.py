"""The check of a policy's answer, where it enters."""

from __future__ import annotations

from dataclasses import is_dataclass

from ares_exp.errors import MalformedAnswerError, PolicyError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.recorded_results import MAX_COUNT, MAX_NUMBER, is_countable


def checked_answer(answer: object) -> LLMResponse:
    """Returns what a policy answered, if that is an answer.

    Raises:
        PolicyError: It is none.
        MalformedAnswerError: Its cost or its usage cannot be counted.
    """
    if not isinstance(answer, LLMResponse):
        raise PolicyError(
            f"Expected the policy to answer with an LLMResponse, got {type(answer).__name__}. Of a text it is made by "
            "LLMResponse.from_text(text)."
        )
    if not isinstance(answer.data, tuple) or not all(map(is_dataclass, answer.data)):
        raise PolicyError(
            "Expected the `data` of the policy's LLMResponse to be a list of pieces such as TextData(text), got "
            f"{answer.data!r:.80}. Of a text it is made by LLMResponse.from_text(text)."
        )
    if not is_countable(answer):
        raise MalformedAnswerError(
            f"Expected the policy's answer to cost 0 or more US dollars, below {MAX_NUMBER:g}, and to have used "
            f"0 or more tokens, below {MAX_COUNT:,}, got cost={answer.cost!r:.80}, usage={answer.usage!r:.200}."
        )
    return answer
