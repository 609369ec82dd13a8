"""Endpoints of chat completions: preflight, retries, and the error classes of responses."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from ares_exp.backoff import retry_after_sec
from ares_exp.errors import (
    AuthenticationError,
    ConfigError,
    ContextOverflowError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    PreflightError,
    QuotaError,
    RateLimitError,
    RefusalError,
    ServerError,
    UnreachableError,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.policy import Check, EpisodeSpec
from tests.closed_port import closed_port
from tests.loopback_endpoint import (
    Behaviour,
    LoopbackEndpoint,
    completion,
    drop,
    endless,
    error,
    json_body,
    raw,
    slow,
)
from tests.unit.policies.conftest import KEY, Make

HI = LLMRequest([{"role": "user", "content": "hi"}])


async def failure(make: Make, *, max_retries: int) -> EndpointError:
    with pytest.raises(EndpointError) as raised:
        await make(max_retries=max_retries)(HI)
    return raised.value


@pytest.mark.parametrize("behaviour", [
    error(408),
    error(409),
    error(429),
    error(500),
    error(503),
    raw(b"<html>Bad gateway</html>", status=502, content_type="text/html"),
    drop(),
    drop(after=b'{"choices": ['),
], ids=["408", "409", "429", "500", "503", "502-html", "dropped", "dropped-midway"])  # fmt: skip
async def test_temporary_errors_are_retried(endpoint: LoopbackEndpoint, make: Make, behaviour: Behaviour) -> None:
    endpoint.then(behaviour, behaviour)
    assert (await make()(HI)).text == "hello"
    assert len(endpoint.requests) == 3
    assert endpoint.requests[0].body == endpoint.requests[2].body


async def test_slow_response_times_out_and_is_retried(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(slow(30), endless(b" "))
    started = time.perf_counter()
    response = await make(timeout_sec=0.8)(HI)
    assert response.text == "hello"
    assert len(endpoint.requests) == 3
    assert 1.6 < time.perf_counter() - started < 25
    assert response.latency_sec is not None
    assert response.latency_sec > 1.6


async def test_retries_are_bounded(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(503, "model is loading")
    with pytest.raises(
        ServerError, match=r"returned 503: model is loading\. Gave up after 3 requests \(policy\.max_retries=2\)"
    ) as raised:
        await make(max_retries=2)(HI)
    assert raised.value.status == 503
    assert len(endpoint.requests) == 3


async def test_timeout_names_its_limit(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = slow(30)
    with pytest.raises(EndpointTimeoutError, match=r"received no response within 0\.05 s") as raised:
        await make(timeout_sec=0.05, max_retries=0)(HI)
    assert raised.value.status is None


async def test_long_error_is_shortened(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(400, "x" * 100_000)
    with pytest.raises(EndpointError) as raised:
        await make()(HI)
    assert len(str(raised.value)) < 700


async def test_retry_after_beyond_the_bound_is_an_error(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(429, headers={"Retry-After": "3600"})
    with pytest.raises(RateLimitError, match=r"asks to wait 3600 s, more than policy\.max_retry_wait_sec=60"):
        await make()(HI)
    assert len(endpoint.requests) == 1


async def test_refused_connection_is_an_unreachable_endpoint(endpoint: LoopbackEndpoint, make: Make) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(EndpointUnreachableError, match=r"failed: .*Gave up after 2 requests") as raised:
            await make(base_url=url, max_retries=1)(HI)
    assert url in str(raised.value)
    assert "refused" in str(raised.value) or "Connect call failed" in str(raised.value)


async def test_outage_is_not_a_failed_try(make: Make) -> None:
    outages = [True, True, False]

    async def until_reachable(error: EndpointError, check: Check) -> bool:
        with pytest.raises(UnreachableError, match="Connect call failed"):
            await check()
        return outages.pop(0)

    with closed_port() as port:
        policy = make(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        client = policy.for_episode(EpisodeSpec("t", until_reachable=until_reachable))
        with pytest.raises(EndpointUnreachableError, match="Gave up after 1 request"):
            await client(HI)
    assert outages == []


@pytest.mark.parametrize("behaviour", [error(401), error(503), drop()], ids=["401", "503", "dropped"])
async def test_error_after_connecting_is_not_an_outage(
    endpoint: LoopbackEndpoint, make: Make, behaviour: Behaviour
) -> None:
    endpoint.then(behaviour)
    asked: list[object] = []

    async def until_reachable(error: EndpointError, check: Check) -> bool:
        asked.append(error)
        return True

    with pytest.raises(EndpointError):
        await make(max_retries=0).for_episode(EpisodeSpec("t", until_reachable=until_reachable))(HI)
    assert asked == []


RETRYABLE = EndpointError("busy", status=503, retryable=True)


def test_backoff_doubles_up_to_its_bound(make: Make) -> None:
    policy = make(max_retries=10_000, retry_base_sec=1.0, max_retry_wait_sec=5.0)
    for tries, longest in [(1, 1), (2, 2), (3, 4), (4, 5), (9_999, 5)]:
        waits = {policy.retry_wait_sec(tries, RETRYABLE) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert len(waits) > 40, "there is no jitter"


def test_backoff_waits_at_least_retry_after(make: Make) -> None:
    policy = make(max_retries=1, retry_base_sec=1.0, max_retry_wait_sec=5.0)
    asked = EndpointError("busy", retryable=True, retry_after_sec=3.0)
    assert all(3.0 <= policy.retry_wait_sec(1, asked) <= 3.5 for _ in range(50))
    at_bound = EndpointError("busy", retryable=True, retry_after_sec=5.0)
    assert policy.retry_wait_sec(1, at_bound) == 5.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        (" 1.5 ", 1.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("1e999", float("inf")),
        ("nan", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_header_is_read(text: str, seconds: float | None) -> None:
    assert retry_after_sec({"retry-after": text}, now=10.0) == seconds


def test_invalid_retry_after_header_is_ignored() -> None:
    assert retry_after_sec({}) is None


@pytest.mark.parametrize("models", [*map(error, (404, 405, 429, 500, 501)), raw(b"<html>", content_type="text/html")])
async def test_endpoint_without_a_model_list_passes(endpoint: LoopbackEndpoint, make: Make, models: Behaviour) -> None:
    endpoint.models = models
    await make().preflight()


@pytest.mark.parametrize(
    ("listed", "is_known"), [(["a", "b"], False), (["m"], True), (["models/m:latest"], True), ([], True)]
)
async def test_preflight_warns_of_unlisted_model(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture, listed: list[str], is_known: bool
) -> None:
    endpoint.models = json_body({"data": [{"id": name} for name in listed]})
    await make().preflight()
    said = f"{endpoint.url} does not list the model `m`. It lists a, b. Set `policy.model=…`."
    assert caplog.messages == ([] if is_known else [said])


async def test_base_url_with_path_of_requests_raises(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"without `/chat/completions`. Set `policy\.base_url=http://h/v1`"):
        make(base_url="http://h/v1/chat/completions/")


@pytest.mark.parametrize("value", ["", "  ", None])
async def test_missing_key_is_a_preflight_error(
    endpoint: LoopbackEndpoint, make: Make, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("LOOPBACK_KEY")
    else:
        monkeypatch.setenv("LOOPBACK_KEY", value)
    with pytest.raises(PreflightError, match=r"LOOPBACK_KEY for the API key of .* is not set") as raised:
        await make().preflight()
    assert "policy.api_key_env=null" in str(raised.value)
    assert not endpoint.others


async def test_key_invalid_in_headers_is_rejected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "sk-ключ")
    with pytest.raises(PreflightError, match="LOOPBACK_KEY contains characters") as raised:
        await make().preflight()
    assert "ключ" not in str(raised.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_key_is_a_preflight_error(endpoint: LoopbackEndpoint, make: Make, status: int) -> None:
    endpoint.models = error(status, f"Incorrect API key provided: {KEY}")
    with pytest.raises(PreflightError, match=rf"returned {status}: .*\*\*\*.* key in LOOPBACK_KEY") as raised:
        await make().preflight()
    assert KEY not in str(raised.value)


async def test_closed_port_is_a_preflight_error(make: Make) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(PreflightError, match=r"Connect call failed|refused") as raised:
            await make(base_url=url).preflight()
    assert f"GET {url}/models failed" in str(raised.value)
    assert "policy.base_url" in str(raised.value)
    assert raised.value.__cause__ is None


async def test_tls_failure_is_a_preflight_error(endpoint: LoopbackEndpoint, make: Make) -> None:
    with pytest.raises(PreflightError, match="SSL"):
        await make(base_url=endpoint.url.replace("http://", "https://")).preflight()


async def test_missing_response_is_a_preflight_error(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.models = slow(30)
    started = time.perf_counter()
    with pytest.raises(PreflightError, match=r"no response within 0\.2 s"):
        await make(preflight_timeout_sec=0.2).preflight()
    assert time.perf_counter() - started < 25


def test_preflight_and_run_may_use_different_loops(endpoint: LoopbackEndpoint) -> None:
    policy = OpenAIPolicy(model="m", base_url=endpoint.url, api_key_env=None)
    asyncio.run(policy.preflight())

    async def run() -> str:
        try:
            return (await policy(HI)).text
        finally:
            await policy.close()

    assert asyncio.run(run()) == "hello"


WITHOUT_CLIENT = """
import asyncio, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "openai":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from ares_exp.errors import PreflightError
from ares_exp.policies.chat_completions import OpenAIPolicy
heavy = {"openai", "aiohttp", "httpx2"} & set(sys.modules)
try:
    asyncio.run(OpenAIPolicy(model="m", api_key_env=None).preflight())
except PreflightError as error:
    print(heavy, error)
"""


def test_missing_client_package_is_a_preflight_error() -> None:
    """Also: importing and making the policy loads none of the heavy packages."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CLIENT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.startswith("set() ")
    assert "pip install 'ares-exp[openai]'" in done.stdout


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
        *[(408, oai(), EndpointTimeoutError), (409, oai(), EndpointError), (529, oai(), ServerError)],
    ],
)  # fmt: skip
async def test_error_response_decides_the_class(
    endpoint: LoopbackEndpoint, make: Make, status: int, body: Any, kind: type[EndpointError]
) -> None:
    endpoint.otherwise = json_body(body, status=status)
    raised = await failure(make, max_retries=0)
    assert type(raised) is kind
    assert raised.status == status
    assert f"returned {status}: " in str(raised)
    assert len(endpoint.requests) == 1


async def test_error_body_replaces_a_good_status(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(json_body({"error": {"code": 502, "message": "the model is down"}}))
    assert (await make(max_retries=1)(HI)).text == "hello"
    endpoint.otherwise = json_body({"error": {"code": 402, "message": "no credit"}})
    raised = await failure(make, max_retries=5)
    assert type(raised) is QuotaError
    assert raised.status == 402
    assert len(endpoint.requests) == 3


async def test_response_with_an_error_is_used(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = json_body(completion("paid for") | {"error": {"code": 502, "message": "cut off"}})
    assert (await make(max_retries=0)(HI)).text == "paid for"


async def test_error_suggests_the_fix(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = json_body(SGLANG, status=400)
    said = str(await failure(make, max_retries=0))
    assert (
        "is longer than the model's context length (40960 tokens). The conversation is too long for the model" in said
    )
