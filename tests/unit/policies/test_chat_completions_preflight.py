"""Errors before a run starts, and their messages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from ares_exp.errors import ConfigError, PreflightError
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.chat_completions import OpenAIPolicy
from tests.closed_port import closed_port
from tests.loopback_endpoint import LoopbackEndpoint, drop, error, json_body, raw, slow

KEY = "sk-loopback-0123456789"


def policy_for(url: str, api_key_env: str | None = "LOOPBACK_KEY") -> OpenAIPolicy:
    return OpenAIPolicy(model="m", base_url=url, api_key_env=api_key_env, preflight_timeout_sec=2)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", KEY)


async def test_all_is_well(endpoint: LoopbackEndpoint) -> None:
    await policy_for(endpoint.url).preflight()
    assert [(other.method, other.path) for other in endpoint.others] == [("GET", "/v1/models")]
    assert endpoint.others[0].headers["authorization"] == f"Bearer {KEY}"
    assert not endpoint.requests, "the preflight must not pay for a response"


async def test_no_key_needed(endpoint: LoopbackEndpoint) -> None:
    await policy_for(endpoint.url, api_key_env=None).preflight()
    assert "authorization" not in endpoint.others[0].headers


@pytest.mark.parametrize("status", [404, 405, 429, 500, 501])
async def test_an_endpoint_without_a_model_list_is_fine(endpoint: LoopbackEndpoint, status: int) -> None:
    endpoint.models = error(status)
    await policy_for(endpoint.url).preflight()


async def test_a_model_list_without_json_passes(endpoint: LoopbackEndpoint) -> None:
    endpoint.models = raw(b"<html>", content_type="text/html")
    await policy_for(endpoint.url).preflight()


@pytest.mark.parametrize(
    ("listed", "is_known"),
    [(["a", "b"], False), (["m"], True), (["models/m:latest"], True), ([], True)],
)
async def test_preflight_warns_of_unlisted_model(
    endpoint: LoopbackEndpoint, caplog: pytest.LogCaptureFixture, listed: list[str], is_known: bool
) -> None:
    endpoint.models = json_body({"data": [{"id": name} for name in listed]})
    await policy_for(endpoint.url).preflight()
    said = f"{endpoint.url} does not list the model `m`. It lists a, b. Set `policy.model=…`."
    assert caplog.messages == ([] if is_known else [said])


def test_base_url_with_path_of_requests_raises() -> None:
    with pytest.raises(ConfigError, match=r"without `/chat/completions`. Set `policy\.base_url=http://h/v1`"):
        policy_for("http://h/v1/chat/completions/")


@pytest.mark.parametrize("value", ["", "  ", None])
async def test_key_is_missing(endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("LOOPBACK_KEY")
    else:
        monkeypatch.setenv("LOOPBACK_KEY", value)
    with pytest.raises(PreflightError, match="LOOPBACK_KEY, which is not set") as raised:
        await policy_for(endpoint.url).preflight()
    assert "policy.api_key_env=null" in str(raised.value)
    assert not endpoint.others


async def test_a_key_invalid_in_headers_is_rejected(
    endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "sk-ключ")
    with pytest.raises(PreflightError, match="LOOPBACK_KEY has characters") as raised:
        await policy_for(endpoint.url).preflight()
    assert "ключ" not in str(raised.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_key_is_refused(endpoint: LoopbackEndpoint, status: int) -> None:
    endpoint.models = error(status, f"Incorrect API key provided: {KEY}")
    with pytest.raises(PreflightError, match=rf"answered {status}: .*\*\*\*.* key in LOOPBACK_KEY") as raised:
        await policy_for(endpoint.url).preflight()
    assert KEY not in str(raised.value)


async def test_a_closed_port_is_a_preflight_error() -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(PreflightError, match=r"Connect call failed|refused") as raised:
            await policy_for(url).preflight()
    assert f"GET {url}/models failed" in str(raised.value)
    assert "policy.base_url" in str(raised.value)
    assert raised.value.__cause__ is None


async def test_host_is_unknown() -> None:
    with pytest.raises(PreflightError, match="no-such-host"):
        await policy_for("http://no-such-host.invalid/v1").preflight()


async def test_tls_fails(endpoint: LoopbackEndpoint) -> None:
    url = endpoint.url.replace("http://", "https://")
    with pytest.raises(PreflightError, match="SSL"):
        await policy_for(url).preflight()


async def test_connection_is_dropped(endpoint: LoopbackEndpoint) -> None:
    endpoint.models = drop()
    with pytest.raises(PreflightError, match=r"policy\.base_url"):
        await policy_for(endpoint.url).preflight()


async def test_no_response_in_time(endpoint: LoopbackEndpoint) -> None:
    endpoint.models = slow(30)
    started = time.perf_counter()
    policy = OpenAIPolicy(model="m", base_url=endpoint.url, api_key_env=None, preflight_timeout_sec=0.2)
    with pytest.raises(PreflightError, match=r"no response within 0\.2 s"):
        await policy.preflight()
    assert time.perf_counter() - started < 25


def test_preflight_and_run_may_use_different_loops(endpoint: LoopbackEndpoint) -> None:
    policy = policy_for(endpoint.url)
    asyncio.run(policy.preflight())

    async def run() -> str:
        try:
            return (await policy(LLMRequest([{"role": "user", "content": "hi"}]))).text
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


def test_client_is_not_installed() -> None:
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
