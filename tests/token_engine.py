"""A trainer's own endpoint, as far as an agent sees it: chat completions with the ids that were read and sampled.

Its fields are those of vLLM's `return_token_ids` and `logprobs`. Text is bytes; a token is a byte, a mark between
messages, or, as a model may well spell it, another id of the same byte:

    engine = TokenEngine(["first reply", "second reply"], spelling="own")
    with LoopbackEndpoint(otherwise=engine) as endpoint:
        ... base_url=endpoint.url ...
        engine.calls       # what it read and sampled

Like vLLM and SGLang, it uses the model's own `defaults` for each sampling parameter that a request does not set.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from aiohttp import web

from tests.loopback_endpoint import Behaviour, Received, completion
from tests.unit.training.sampled_episodes import Call

ROLES = ("system", "user", "assistant", "tool")
START, END, OWN = 300, 299, 1000
"""Ids: BEGIN and the number of a role, the end of a message, OWN and a byte."""


WITHOUT_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The parameters that vLLM reads from a model's generation config, and its values for a model without one."""


class TokenEngine:
    """Answers with the replies, again from the first when they are used up.

    Attributes:
        calls: What was read and sampled, in order.
        sampled_with: The sampling parameters that it used for each call.
        version: Of the weights.
    """

    def __init__(
        self,
        replies: Sequence[str],
        *,
        spelling: Literal["template", "own"] = "template",
        continues: bool = False,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Prepares to answer.

        Args:
            replies: What the model says, by the number of its turn in the conversation.
            spelling: Whether it samples the ids into which the chat template turns the same text, or others.
            continues: Whether the engine keeps sampled ids in the history, in place of those of the template.
            defaults: The model's `generation_config.json`.
        """
        self._replies = replies
        self._own = spelling == "own"
        self._continues = continues
        self._defaults = {**WITHOUT_DEFAULTS, **(defaults or {})}
        self.calls: list[Call] = []
        self.sampled_with: list[dict[str, float]] = []
        self.version = "step-7"

    async def __call__(self, _: web.Request, received: Received) -> web.StreamResponse:
        assert received.body["return_token_ids"] is True
        assert received.body["logprobs"] is True
        messages = received.body["messages"]
        text = self._replies[sum(message["role"] == "assistant" for message in messages) % len(self._replies)]
        prompt = [token for message in messages for token in self._message(message)]
        call = Call([*prompt, START + ROLES.index("assistant")], self._sampled(text), version=self.version)
        self.calls.append(call)
        asked = {name: received.body.get(name) for name in self._defaults}
        self.sampled_with.append({**self._defaults, **{k: value for k, value in asked.items() if value is not None}})
        return web.json_response(self._respond(text, call, received.body["model"]))

    def _message(self, message: dict[str, Any]) -> list[int]:
        role, text = message["role"], message["content"]
        text = text if isinstance(text, str) else "".join(part["text"] for part in text)
        kept = role == "assistant" and self._continues
        return [START + ROLES.index(role), *(self._sampled(text) if kept else [*text.encode(), END])]

    def _sampled(self, text: str) -> list[int]:
        return [*(OWN + byte if self._own else byte for byte in text.encode()), END]

    def _respond(self, text: str, call: Call, model: str) -> dict[str, Any]:
        body = completion(text, model=model)
        body["usage"] = {"prompt_tokens": len(call.prompt), "completion_tokens": len(call.completion)}
        body["choices"][0] |= {
            "token_ids": list(call.completion),
            "logprobs": {"content": [{"token": "", "logprob": value} for value in call.logprobs]},
        }
        return {**body, "prompt_token_ids": list(call.prompt), "policy_version": self.version}


def text_completion(prompt: Sequence[int], text: str, ids: Sequence[int], finish: str = "stop") -> dict[str, Any]:
    tokens = {"tokens": ["?"] * len(ids), "token_logprobs": [-0.5] * len(ids), "text_offset": [], "top_logprobs": []}
    choice = {"index": 0, "text": text, "logprobs": tokens, "finish_reason": finish, "stop_reason": None}
    choice |= {"token_ids": [*ids], "prompt_token_ids": [*prompt]}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def samples(text: str, finish: str = "stop", **more: Any) -> Behaviour:
    """Responds to a prompt of token ids with the bytes of a text, and 256 if it ends there."""

    async def behave(_: web.Request, received: Received) -> web.StreamResponse:
        ids = [*text.encode(), *([256] if finish == "stop" else [])]
        return web.json_response(text_completion(received.body["prompt"], text, ids, finish) | more)

    return behave
