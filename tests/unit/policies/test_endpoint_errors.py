"""Which class a refusal of an endpoint's becomes: what real servers send, sent by a real HTTP server."""

from __future__ import annotations

from typing import Any

import pytest

from ares_exp.errors import (
    AuthenticationError,
    ContextOverflowError,
    EndpointError,
    EndpointTimeoutError,
    QuotaError,
    RateLimitError,
    RefusalError,
    ServerError,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.chat_completions import OpenAIPolicy
from tests.loopback_endpoint import LoopbackEndpoint, completion, error, json_body

HI = LLMRequest([{"role": "user", "content": "hi"}])

SGLANG = {
    "object": "error",
    "message": "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}
LLAMA_CPP = {
    "code": 400,
    "message": "the request exceeds what is available",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 14429,
    "n_ctx": 8192,
}
MODERATED = {
    "code": 403,
    "message": "flagged",
    "metadata": {"reasons": ["x"], "flagged_input": "hi", "provider_name": "p"},
}


def oai(**fields: Any) -> dict[str, Any]:
    return {"error": {"message": "in its own words", **fields}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, oai(type="invalid_request_error", param=None, code="context_length_exceeded"), ContextOverflowError),
        (400, {"error": LLAMA_CPP}, ContextOverflowError),
        (500, {"error": {**LLAMA_CPP, "code": 500}}, ContextOverflowError),
        (400, oai(type="BadRequestError", param="input_tokens", code=400), ContextOverflowError),
        (400, oai(type="BadRequestError", param="input_text", code=400), ContextOverflowError),
        (400, SGLANG, ContextOverflowError),
        (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, ContextOverflowError),
        (400, {"error": {"message": "This model's maximum context length is 8192 tokens."}}, ContextOverflowError),
        (429, {"error": {"message": "too many tokens for the context window, wait"}}, RateLimitError),
        (400, oai(type="BadRequestError", param="temperature", code=400), EndpointError),
        (400, {"detail": "no such field"}, EndpointError),
        (400, {"error": "just text"}, EndpointError),
        (400, ["a list"], EndpointError),
        (400, oai(code=["no", "name"], type={}, metadata=7), EndpointError),
        (429, oai(type="insufficient_quota", code="project_spend_limit_exceeded"), QuotaError),
        (429, oai(type="insufficient_quota", code=None), QuotaError),
        (402, oai(code=402), QuotaError),
        (403, oai(type="billing_error"), QuotaError),
        (400, oai(code="content_filter", innererror={"code": "ResponsibleAIPolicyViolation"}), RefusalError),
        (400, oai(code="content_policy_violation"), RefusalError),
        (403, {"error": MODERATED}, RefusalError),
        (401, oai(type="authentication_error"), AuthenticationError),
        (403, oai(type="permission_error"), AuthenticationError),
    ],
)  # fmt: skip
async def test_class_of_a_refusal(
    endpoint: LoopbackEndpoint, status: int, body: Any, kind: type[EndpointError]
) -> None:
    endpoint.otherwise = json_body(body, status=status)
    raised = await failure(endpoint, max_retries=0)
    assert type(raised) is kind
    assert raised.status == status
    assert f"answered {status}: " in str(raised)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(408, EndpointTimeoutError), (409, EndpointError), (429, RateLimitError), (500, ServerError), (529, ServerError)],
)
async def test_a_temporary_error_is_retried_with_its_class(
    endpoint: LoopbackEndpoint, status: int, kind: type[EndpointError]
) -> None:
    endpoint.otherwise = error(status, "not now", code="busy")
    raised = await failure(endpoint, max_retries=1)
    assert type(raised) is kind
    assert (raised.status, raised.code) == (status, "busy")
    assert "Gave up after 2 tries" in str(raised)
    assert len(endpoint.requests) == 2


async def test_an_error_body_replaces_a_good_status(endpoint: LoopbackEndpoint) -> None:
    endpoint.then(json_body({"error": {"code": 502, "message": "the model is down"}}))
    policy = make(endpoint, max_retries=1)
    assert (await policy(HI)).text == "hello"
    await policy.close()
    endpoint.otherwise = json_body({"error": {"code": 402, "message": "no credit"}})
    raised = await failure(endpoint, max_retries=5)
    assert type(raised) is QuotaError
    assert raised.status == 402
    assert len(endpoint.requests) == 3


async def test_a_response_with_an_error_is_used(endpoint: LoopbackEndpoint) -> None:
    endpoint.otherwise = json_body(completion("paid for") | {"error": {"code": 502, "message": "cut off"}})
    policy = make(endpoint, max_retries=0)
    assert (await policy(HI)).text == "paid for"
    await policy.close()


async def test_an_error_suggests_the_fix(endpoint: LoopbackEndpoint) -> None:
    endpoint.otherwise = json_body(SGLANG, status=400)
    said = str(await failure(endpoint, max_retries=0))
    assert "is longer than the model's context length (40960 tokens). The episode has outgrown the model" in said


def make(endpoint: LoopbackEndpoint, *, max_retries: int) -> OpenAIPolicy:
    return OpenAIPolicy(
        model="m", base_url=endpoint.url, api_key_env=None, retry_base_sec=0.01, max_retries=max_retries
    )


async def failure(endpoint: LoopbackEndpoint, *, max_retries: int) -> EndpointError:
    policy = make(endpoint, max_retries=max_retries)
    try:
        with pytest.raises(EndpointError) as raised:
            await policy(HI)
    finally:
        await policy.close()
    return raised.value
