"""The mapping of an endpoint's HTTP statuses and error objects to the error classes of `ares_exp.errors`.

Servers describe an error by an object in the field `error` (SGLang: by the complete body). The fields of this object
differ between servers:

| error | servers and their fields |
|---|---|
| context overflow | `code: context_length_exceeded` (OpenAI, Azure, OpenRouter, …); `type: exceed_context_size_error` (llama.cpp, https://github.com/ggml-org/llama.cpp/pull/15780); `param: input_tokens` or `input_text` (vLLM since 0.16, `vllm/renderers/params.py`); only in the message (SGLang, older vLLM, Anthropic) |
| no credit | 402 (OpenRouter, DeepSeek, Together); 429 with `type: insufficient_quota` and several codes (OpenAI, https://platform.openai.com/docs/guides/error-codes); `type: billing_error`, or only in the message (Anthropic) |
| refusal | 400 with `code: content_filter` (Azure) or `content_policy_violation` (OpenAI); 403 with `metadata.flagged_input` (OpenRouter, https://openrouter.ai/docs/errors) |

The text of the message is searched only in 4xx responses, and only if `code` and `type` do not contain a known name.
"""

# ruff: noqa: E501  # the table

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

_BY_NAME: dict[str, type[EndpointError]] = {
    "context_length_exceeded": ContextOverflowError,
    "exceed_context_size_error": ContextOverflowError,
    "insufficient_quota": QuotaError,
    "credit_balance_exhausted": QuotaError,
    "organization_spend_limit_exceeded": QuotaError,
    "project_spend_limit_exceeded": QuotaError,
    "organization_usage_limit_exceeded": QuotaError,
    "billing_hard_limit_reached": QuotaError,
    "billing_error": QuotaError,
    "content_filter": RefusalError,
    "content_policy_violation": RefusalError,
}
_BY_STATUS: dict[int, type[EndpointError]] = {
    401: AuthenticationError,
    402: QuotaError,
    403: AuthenticationError,
    408: EndpointTimeoutError,
    429: RateLimitError,
}
_STATUS_BY_NAME = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "server_error": 500,
    "api_error": 500,
    "overloaded_error": 529,
    "timeout_error": 504,
    "authentication_error": 401,
    "permission_error": 403,
    "billing_error": 402,
    "not_found_error": 404,
    "request_too_large": 413,
}
"""HTTP statuses for errors that servers send with status 200. Keys are the error names of OpenAI and Anthropic."""

_TOO_LONG_PARAMETERS = ("input_tokens", "input_text")
_TOO_LONG_WORDS = ("context length", "context size", "context window", "context limit", "prompt is too long")
_TOO_LONG_STATUSES = (400, 413, 422)

_TRIED_AGAIN = (408, 409, 429)
_REMEDIES: dict[type[EndpointError], str] = {
    AuthenticationError: "Check the key in {key}, and its permissions.",
    ContextOverflowError: "The conversation is too long for the model. Use a model with a longer context, or a smaller limits.steps.",
    QuotaError: "Add credit or raise the limit, then resume the run.",
}
_NOT_FOUND = "Check policy.model and policy.base_url."


def status_of(error: Mapping[Any, Any]) -> int | None:
    """Returns the HTTP status for an error object that was sent with status 200; `None` if it describes no error."""
    named = [name for name in (error.get("code"), error.get("type")) if name is not None]
    for name in named:
        if isinstance(name, int):  # OpenRouter
            return name
        if isinstance(name, str) and name in _STATUS_BY_NAME:
            return _STATUS_BY_NAME[name]
    return 400 if named and error.get("message") else None


def refused(
    request: str, *, status: int, error: object, shown: str, key_name: str | None, retry_after_sec: float | None
) -> EndpointError:
    """Returns the exception for a request to which the server responded with an error.

    Args:
        request: Method and URL, for the message.
        status: HTTP status.
        error: Error object of the server.
        shown: Text of the server's error, without secrets, for the message.
        key_name: Environment variable with the API key; `None` if no variable is set.
        retry_after_sec: Seconds to wait before a retry, as demanded by the server; `None` if it demands no wait.
    """
    fields = error if isinstance(error, Mapping) else {}
    kind = _class_of(status, fields)
    remedy = _REMEDIES.get(kind, _NOT_FOUND if status == 404 else "")
    remedy = remedy.format(key=key_name or "policy.api_key_env (null now)")
    code = fields.get("code")
    return kind(
        f"{request} returned {status}: {shown.rstrip('.')}. {remedy}".rstrip(),
        status=status,
        code=None if code is None else str(code),
        retryable=kind in (ServerError, RateLimitError) or (status in _TRIED_AGAIN and kind is not QuotaError),
        retry_after_sec=retry_after_sec,
    )


def _class_of(status: int, error: Mapping[Any, Any]) -> type[EndpointError]:
    for name in (error.get("code"), error.get("type")):
        if isinstance(name, str) and name in _BY_NAME:
            return _BY_NAME[name]
    message = str(error.get("message")).lower()
    is_too_long = error.get("param") in _TOO_LONG_PARAMETERS or any(word in message for word in _TOO_LONG_WORDS)
    if status in _TOO_LONG_STATUSES and is_too_long:
        return ContextOverflowError
    if status == 400 and "credit balance" in message:
        return QuotaError
    metadata = error.get("metadata")
    if status == 403 and isinstance(metadata, Mapping) and "flagged_input" in metadata:
        return RefusalError
    return _BY_STATUS.get(status, ServerError if status >= 500 else EndpointError)
