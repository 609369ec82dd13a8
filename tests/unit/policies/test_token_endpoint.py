"""Engines that report the tokens that they read and sampled, with bodies in the schemas of vLLM and SGLang."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ares_exp.errors import ConfigError, MalformedResponseError, PreflightError, ServerError, UnsendableRequestError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING
from ares_exp.policies.policy import EpisodeSpec, UpdatablePolicy
from ares_exp.policies.token_endpoint import SglangPolicy, TokenEndpointPolicy, VllmPolicy
from ares_exp.testing.policy_contract import PolicyContract
from tests.byte_tokenizer import use_byte_tokenizer
from tests.loopback_endpoint import LoopbackEndpoint, Received, completion, error, json_body
from tests.token_engine import samples, text_completion

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
LOGPROBS = [
    {"token": text, "logprob": value, "bytes": [1], "top_logprobs": []} for text, value in (("a", -0.5), ("b", -1))
]
ENGINES = {"vllm": VllmPolicy, "sglang": SglangPolicy}


def chat_body(engine: str) -> dict[str, Any]:
    body = completion("ab", tool_calls=[], reasoning_content=None)
    choice = body["choices"][0] | {"logprobs": {"content": LOGPROBS}}
    if engine == "vllm":
        choice |= {"stop_reason": 7, "token_ids": [8, 7], "routed_experts": None}
        body |= {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": None, "kv_transfer_params": None, "metrics": None}
    else:
        choice |= {"matched_stop": 7, "response_token_ids": [8, 7], "prompt_token_ids": [1, 2, 3]}
        spans = [{"version": "4", "start": 0, "end": 2}]
        body |= {"metadata": {"weight_version": "4", "weight_versions": spans}}
    return body | {"choices": [choice]}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(engine: str) -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint(otherwise=json_body(chat_body(engine))) as made:
        yield made


def policy_of(engine: str, endpoint: LoopbackEndpoint, **more: Any) -> TokenEndpointPolicy:
    return ENGINES[engine](model="m", base_url=endpoint.url, max_retries=0, **more)


def ask(text: str = "hello", **more: Any) -> LLMRequest:
    return LLMRequest([{"role": "user", "content": text}], **more)


class TestTokenEndpoint(PolicyContract):
    @pytest.fixture
    def engine(self) -> str:
        return "vllm"

    @pytest.fixture
    def policy(self, endpoint: LoopbackEndpoint) -> LLMClient:
        return policy_of("vllm", endpoint)


async def test_tokens_are_requested_and_read(
    engine: str, endpoint: LoopbackEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of(engine, endpoint, policy_version="3", temperature=1.0, extra_body={"top_k": 5})
    response = await policy.for_episode(EpisodeSpec("t"))(ask(max_output_tokens=9))
    await policy.close()
    body = endpoint.requests[0].body
    assert (body["return_token_ids"], body["logprobs"], body["max_tokens"], body["top_k"]) == (True, True, 9, 5)
    assert response.text == "ab"
    assert response.prompt_token_ids == (1, 2, 3)
    assert response.completion_token_ids == (8, 7)
    assert response.logprobs == (-0.5, -1.0)
    assert response.policy_version == ("3" if engine == "vllm" else "4"), "what the engine says comes first"
    assert caplog.messages == []


def sampling_in(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mapping[name] for name in NEUTRAL_SAMPLING if name in mapping}


SET_BY_USER = {"temperature": 0.7, "extra_body": {"min_p": 0.1, "repetition_penalty": 1.2, "top_k": 9}}
SET_BY_AGENT = {"temperature": 0.2, "top_p": 0.9, "top_k": 5}
SAMPLING = [
    pytest.param({}, {}, {}, id="nothing set"),
    pytest.param({}, SET_BY_AGENT, SET_BY_AGENT, id="agent"),
    pytest.param(
        SET_BY_USER,
        SET_BY_AGENT,
        {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.2},
        id="user and agent",
    ),
    pytest.param({"extra_body": {"temperature": 0.4}}, {}, {"temperature": 0.4}, id="user in extra_body"),
]


@pytest.mark.parametrize(("user", "agent", "expected"), SAMPLING)
async def test_request_sets_every_sampling_parameter(
    engine: str, endpoint: LoopbackEndpoint, user: dict[str, Any], agent: dict[str, Any], expected: dict[str, Any]
) -> None:
    policy = policy_of(engine, endpoint, **user)
    response = await policy(ask(**agent))
    await policy.close()
    assert sampling_in(endpoint.requests[0].body) == {**NEUTRAL_SAMPLING, **expected}
    assert sampling_in(response.sampling or {}) == {**NEUTRAL_SAMPLING, **expected}


@pytest.mark.parametrize(("sharp", "checks"), [(-0.2, 2), (-1.0, 2), (None, 3)])
async def test_processed_logprobs_are_checked_and_recorded(
    engine: str, endpoint: LoopbackEndpoint, sharp: float | None, checks: int
) -> None:
    """With the largest log-probability at another temperature, or with a server without it."""

    async def respond(_: web.Request, received: Received) -> web.StreamResponse:
        if received.path == "/v1/chat/completions":
            return web.json_response(chat_body(engine))
        body = text_completion([1], "x", [5])
        value = -1.0 if received.body["temperature"] == 1 else sharp
        body["choices"][0]["logprobs"]["top_logprobs"] = None if sharp is None else [{"x": value, "y": -9.0}]
        return web.json_response(body)

    endpoint.otherwise = respond
    policy = policy_of(engine, endpoint, temperature=0.7)
    policy.use_key("a key of the trainer")
    for _ in range(3):
        response = await policy(ask())
        assert ("logprobs_mode" in (response.sampling or {})) == (sharp == -0.2)
    await policy.close()
    assert len(endpoint.requests) == 3 + checks
    assert {one.headers["authorization"] for one in endpoint.requests} == {"Bearer a key of the trainer"}


async def test_engine_without_tokens_is_a_warning(
    engine: str, endpoint: LoopbackEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.then(json_body(completion("ab")))
    policy = policy_of(engine, endpoint)
    assert (await policy(ask())).text == "ab"
    await policy.close()
    (message,) = caplog.messages
    assert "returns no token ids" in message


async def test_both_versions_of_changing_weights_are_recorded(endpoint: LoopbackEndpoint, engine: str) -> None:
    if engine == "vllm":
        pytest.skip("it does not say")
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    endpoint.then(json_body(chat_body(engine) | {"metadata": {"weight_version": "5", "weight_versions": spans}}))
    policy = policy_of(engine, endpoint)
    assert (await policy(ask())).policy_version == "4+5"
    await policy.close()


@pytest.mark.parametrize(
    ("sent", "header", "expected"),
    [
        ({"policy_version": "1"}, "2", ("1", "body")),
        ({"weight_version": "1"}, "2", ("1", "body")),
        ({"metadata": {"weight_version": "3"}}, "2", ("2", "header")),
        ({"metadata": {"weight_version": "3"}}, None, ("3", "metadata")),
        ({"metadata": {"weight_version": "default"}}, None, ("4", "announced")),
    ],
)
async def test_version_is_recorded_with_its_origin(
    endpoint: LoopbackEndpoint, engine: str, sent: dict[str, Any], header: str | None, expected: tuple[str, str]
) -> None:
    async def respond(_: web.Request, received: Received) -> web.StreamResponse:
        body = chat_body("vllm") | sent
        return web.json_response(body, headers={} if header is None else {"X-Policy-Version": header})

    endpoint.then(respond)
    policy = policy_of(engine, endpoint)
    response = await policy.for_episode(EpisodeSpec("t", version=lambda: "4"))(ask())
    await policy.close()
    assert (response.policy_version, response.policy_version_from) == expected


async def test_concurrent_episodes_load_the_tokenizer_once(
    endpoint: LoopbackEndpoint, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = use_byte_tokenizer(monkeypatch)
    endpoint.otherwise = samples("yes")
    policy = policy_of(engine, endpoint, continue_tokens=True)
    responses = await asyncio.gather(*(policy.for_episode(EpisodeSpec("t", number))(ask()) for number in range(4)))
    await policy.close()
    assert [response.text for response in responses] == ["yes"] * 4
    assert loaded == ["m"]


async def test_update_loads_new_weights(engine: str, endpoint: LoopbackEndpoint, tmp_path: Path) -> None:
    policy = policy_of(engine, endpoint)
    assert isinstance(policy, UpdatablePolicy)
    await policy.update("1")
    with pytest.raises(ConfigError, match="directory" if engine == "sglang" else "with your trainer"):
        await policy.update("2", {})
    if engine == "sglang":
        endpoint.then(json_body({"success": True, "message": "Succeeded", "num_paused_requests": 0}))
        await policy.update("2", tmp_path)
        (received,) = endpoint.requests
        assert received.path == "/update_weights_from_disk"
        assert received.body == {"model_path": str(tmp_path), "weight_version": "2"}
        endpoint.then(json_body({"success": False, "message": "no such model"}, status=500))
        with pytest.raises(ServerError):
            await policy.update("3", tmp_path / "nowhere")
    assert policy.policy_version == ("2" if engine == "sglang" else "1")
    await policy.close()


async def test_missing_tokenizer_is_a_preflight_error(endpoint: LoopbackEndpoint, engine: str, tmp_path: Path) -> None:
    policy = policy_of(engine, endpoint, continue_tokens=True, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(PreflightError, match=r"saved tokenizer|pip install transformers"):
        await policy.preflight()
    await policy.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tests.tiny_model import tiny_tokenizer

    return tiny_tokenizer()


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
from ares_exp.policies.in_process.chat_template import load_tokenizer
load_tokenizer(sys.argv[1], chat_template=None, trust_remote_code=False)
"""


@pytest.mark.train
def test_tokenizer_loads_silently_without_torch(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout + done.stderr == ""


class Sampler:
    """An engine that responses ids with ids: what it says, and its end token."""

    def __init__(self, engine: str, tokenizer: Any, *says: str) -> None:
        self._engine, self._tokenizer, self._says = engine, tokenizer, list(says)

    async def __call__(self, _: web.Request, received: Received) -> web.StreamResponse:
        assert received.path == "/v1/completions"
        text = self._says.pop(0) if received.body.get("return_token_ids") else "x"
        ids = self._tokenizer(text)["input_ids"]
        # The engine writes invalid bytes as one character: its text differs from the sampled tokens.
        body = text_completion(received.body["prompt"], text.replace("é", "�"), [*ids, 256])
        return web.json_response(body)


@pytest.mark.train
async def test_conversation_continues_from_its_ids(
    engine: str, endpoint: LoopbackEndpoint, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    endpoint.otherwise = Sampler(engine, tokenizer, "né", "later", "last")
    policy = policy_of(
        engine, endpoint, continue_tokens=True, tokenizer=str(tmp_path), seed="episode", policy_version="0"
    )
    await policy.preflight()
    client = policy.for_episode(EpisodeSpec("t", seed=7))
    first = await client(ask(system_prompt="Be short.", stop_sequences=["STOP"], temperature=0.5))
    assert first.text == "n�"
    sent = endpoint.requests[0].body
    assert tokenizer.decode(sent["prompt"]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    settings = {name: value for name, value in sent.items() if name != "prompt"}
    assert settings == {
        "model": "m", "max_tokens": 2048, "return_token_ids": True, "logprobs": 1, "skip_special_tokens": False,
        **NEUTRAL_SAMPLING, "temperature": 0.5, "stop": ["STOP"], "seed": 7,
    }  # fmt: skip

    asked = {"system_prompt": "Be short.", "stop_sequences": ["STOP"]}
    said = [{"role": "assistant", "content": first.text}, {"role": "user", "content": "go on"}]
    later = LLMRequest([*ask().messages, *said], **asked)
    second = await client(later)
    whole = [*(first.prompt_token_ids or ()), *(first.completion_token_ids or ())]
    assert list(second.prompt_token_ids or ())[: len(whole)] == whole
    assert tokenizer.decode(list(second.prompt_token_ids or ())[len(whole) :]) == (
        "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.logprobs == (-0.5,) * len(second.completion_token_ids or ())
    assert second.policy_version == "0"
    assert second.usage.prompt_tokens == len(second.prompt_token_ids or ())

    resumed = policy.for_episode(EpisodeSpec("t", seed=7))
    assert hasattr(resumed, "advance")
    resumed.advance(ask(**asked), first)
    assert (await resumed(later)).prompt_token_ids == second.prompt_token_ids
    await policy.close()


@pytest.mark.train
async def test_tool_calls_are_parsed_locally(
    engine: str, endpoint: LoopbackEndpoint, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    endpoint.otherwise = Sampler(engine, tokenizer, f"I look.\n{call}")
    policy = policy_of(engine, endpoint, continue_tokens=True, tokenizer=str(tmp_path))
    response = await policy(ask(tools=TOOLS))
    assert response.data[0] == TextData("I look.")
    assert isinstance(response.data[1], ToolCallData)
    assert response.data[1].arguments == '{"command": "ls"}'
    assert response.finish_reason == "tool_calls"
    with pytest.raises(UnsendableRequestError, match="cannot force"):
        await policy(ask(tools=TOOLS, tool_choice="required"))
    await policy.close()


@pytest.mark.train
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt_token_ids": [1, 2]}, "it reported 2 other ids"),
        ({"text": None}, "text"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"logprobs": {"token_logprobs": [None]}}, "token_logprobs"),
    ],
)
async def test_malformed_responses_are_rejected(
    endpoint: LoopbackEndpoint, engine: str, tokenizer: Any, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    body = text_completion([1], "x", [5])
    body["choices"][0] |= changed
    endpoint.then(json_body(body), error(500), json_body({"choices": []}))
    policy = policy_of(engine, endpoint, continue_tokens=True, tokenizer=str(tmp_path))
    with pytest.raises(MalformedResponseError, match=said):
        await policy(ask())
    with pytest.raises(ServerError):
        await policy(ask())
    with pytest.raises(MalformedResponseError, match="choices"):
        await policy(ask())
    await policy.close()


def test_malformed_bodies_are_malformed_responses() -> None:
    policy = VllmPolicy(model="m", base_url="http://127.0.0.1:1/v1")
    for body in ({}, {"choices": []}, {"choices": ["a"]}, []):
        with pytest.raises(MalformedResponseError):
            policy.read_response(body, lambda _: None)
    assert isinstance(policy.read_response(completion("x"), lambda _: None), LLMResponse)
