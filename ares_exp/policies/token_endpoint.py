"""Base class of policies for inference servers that return token ids and accept token ids as prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from ares_exp.errors import ConfigError, MalformedResponseError, PolicyError, PreflightError, WireFormatError
from ares_exp.llms.chat_messages import ReasoningField
from ares_exp.llms.openai_chat import MaxTokensField, StreamedCompletion, response_from_body
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import Report, list_of, optional, required, typed
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import ModelName, Seconds, Temperature, TopP, Url, VariableName
from ares_exp.policies.in_process.chat_template import ChatTemplate, ChatTemplates
from ares_exp.policies.in_process.sampling import DEFAULT_MAX_OUTPUT_TOKENS, NEUTRAL_SAMPLING, PROCESSED_LOGPROBS
from ares_exp.policies.in_process.token_client import TokenClient, TokenRequest, sampling_of
from ares_exp.policies.policy import EpisodeSpec, Weights

logger = logging.getLogger(__name__)

ENGINE_KEYS = ("kv_transfer_params", "ec_transfer_params", "prompt_logprobs", "metrics", "sglext", "metadata")
"""Fields that some engines add to the body of a response. They are removed before the body is parsed."""
PROBED_TEMPERATURE = 0.1
MAX_PROBED_GAP = 0.1
"""Maximum difference between two log-probabilities of a token that numerical errors of the server can explain."""
CHOICE_KEYS = ("stop_reason", "matched_stop", "hidden_states", "routed_experts", "prompt_token_ids")


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class TokenEndpointPolicy(OpenAIPolicy):
    """Responds with an inference engine. Responses have `prompt_token_ids`, `completion_token_ids` and `logprobs`.

    The policy has the options of `openai` and the following options. Each request sets every sampling parameter,
    because the server would otherwise use the values in the model's `generation_config.json`. The policy's value takes
    precedence over the agent's value. If neither is set, the neutral default applies (`NEUTRAL_SAMPLING`).

    Attributes:
        temperature: Sampling temperature. A value takes precedence over the agent's value. `None` keeps the agent's
            value, or sends 1.
        top_p: Threshold for nucleus sampling. A value takes precedence over the agent's value. `None` keeps the agent's
            value, or sends 1. Set the other sampling parameters in `extra_body`.
        continue_tokens: Whether to render and tokenise prompts in this process, and to continue conversations with the
            token ids of earlier responses. Each prompt then starts with exactly the ids of the earlier prompt and
            response. This requires the package transformers, for the tokenizer. If it is not set, the engine tokenises
            each prompt and reports the token ids.
        tokenizer: Directory or hub name of the tokenizer, for `continue_tokens`. Default: the model's tokenizer.
        chat_template: File with a chat template that replaces the tokenizer's template.
        trust_remote_code: Whether code from the tokenizer's files may run.
        policy_version: Version of the engine's weights, which is recorded in responses. A version in the engine's
            response takes precedence.
    """

    option: ClassVar[str] = ""
    """Name of the option `policy=…`. Error messages contain it."""

    base_url: Url = field()
    api_key_env: VariableName | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    continue_tokens: bool = False
    tokenizer: ModelName | None = None
    chat_template: Path | None = None
    trust_remote_code: bool = False
    policy_version: str | None = None
    # Not configurable: responses are not streamed, and engines know these fields.
    stream: bool = field(init=False, default=False)
    stream_idle_sec: Seconds = field(init=False, default=120.0)
    max_tokens_field: MaxTokensField = field(init=False, default="max_tokens")
    send_reasoning: Literal[False, True, ReasoningField] = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Creates the endpoint. `preflight` or the first request loads the tokenizer."""
        path = "completions" if self.continue_tokens else "chat/completions"
        self.wire = EndpointWire(self.option, path, "choices", response_from_body, StreamedCompletion)
        super().__post_init__()
        self.templates = ChatTemplates()  # a rollout service sets this and the next attribute
        self.continues_aborted = False
        self._without_episode: LLMClient | None = None
        self._updating = asyncio.Lock()
        self._probing = asyncio.Lock()
        self._processed: bool | None = None

    async def preflight(self) -> None:
        """Runs the checks of `EndpointPolicy.preflight`, and loads the tokenizer if needed."""
        await super().preflight()
        if self.continue_tokens:
            await self._chat()

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client for one episode. With `continue_tokens`, it continues the token ids of earlier responses."""
        if not self.continue_tokens:
            return super().for_episode(episode)
        return TokenClient(
            spec=episode,
            load=self._chat,
            prepare=self._with_own_settings,
            sample=self._sample,
            warn=self._warn_once,
            max_concurrency_per_episode=self.max_concurrency_per_episode,
            strict=self.strict,
            continues_aborted=self.continues_aborted,
        )

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request; see `EndpointPolicy.__call__`."""
        if not self.continue_tokens:
            return await super().__call__(request)
        self._without_episode = self._without_episode or self.for_episode(EpisodeSpec(""))
        return await self._without_episode(request)

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Updates the weights; see `UpdatablePolicy.update`. Subclasses override `send_weights`, which it calls."""
        async with self._updating:
            if weights is not None:
                await self.send_weights(version, weights)
            self.policy_version = version

    async def send_weights(self, version: str, weights: Weights) -> None:
        """Makes the engine use new weights. Default: raises `ConfigError`.

        Raises:
            ConfigError: The engine does not support weights in this form.
            EndpointError: The engine rejected the weights or failed.
        """
        raise ConfigError(
            f"policy={self.option} cannot send weights to its engine. Send them with your trainer while no "
            f"response is in progress, then call update({version!r})."
        )

    async def response_to(self, body: Mapping[str, Any], episode: EpisodeSpec) -> LLMResponse:
        """Posts a body and converts the response; see `EndpointPolicy.response_to`."""
        response = await super().response_to(body, episode)
        if response.completion_token_ids is None or response.prompt_token_ids is None or response.logprobs is None:
            self._warn_once(
                f"{self._endpoint.base_url} returns no token ids or no logprobs, although they were requested "
                "(`return_token_ids`, `logprobs`), so there are no tokens to train on. Check the version of "
                "the engine."
            )
        sampling = response.sampling
        if body.get("temperature") not in (None, 1) and await self._processes_logprobs():
            sampling = {**(sampling or {}), **PROCESSED_LOGPROBS}
        return replace(response, sampling=sampling)

    def version_at(self, episode: EpisodeSpec) -> dict[str, Any]:
        """Returns the version that `policy_version` or `update` set; see `EndpointPolicy.version_at`."""
        if self.policy_version is None:
            return super().version_at(episode)
        return {"policy_version": self.policy_version, "policy_version_from": "policy"}

    async def _processes_logprobs(self) -> bool:
        """Returns whether the server's log-probabilities take the temperature into account.

        To find out, the first call sends the same prompt at two temperatures, and compares the largest log-probability
        of the next token. Returns `False` if the server's responses do not allow this.
        """
        async with self._probing:
            if self._processed is None:
                url = f"{self._endpoint.base_url}/completions"
                prompt = {"model": self.model, "prompt": "The", "max_tokens": 1, "logprobs": 1, **NEUTRAL_SAMPLING}
                try:
                    plain, sharp = [
                        _largest_logprob(
                            await self._endpoint.post(
                                prompt | {"temperature": one}, timeout_sec=self.timeout_sec, url=url
                            )
                        )
                        for one in (1.0, PROBED_TEMPERATURE)
                    ]
                except (PolicyError, WireFormatError) as error:
                    logger.info("Cannot check whether log-probabilities depend on the temperature: %s", error)
                    return False
                self._processed = abs(plain - sharp) > MAX_PROBED_GAP
            return self._processed

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """Returns a request body that sets all sampling parameters and requests token ids and log-probabilities."""
        body = super().body_of(replace(request, top_k=None), model, episode)
        return {**body, **sampling_of(request), "return_token_ids": True, "logprobs": True}

    def read_response(self, body: Any, report: Report) -> LLMResponse:
        """Converts the body of a response; see `EndpointPolicy.read_response`."""
        try:
            if self.continue_tokens:
                return _completion(body)
            return replace(super().read_response(_as_chat(body), report), **_version_of(body))
        except WireFormatError as error:
            raise MalformedResponseError(str(error)) from None

    async def _sample(self, asked: TokenRequest) -> LLMResponse:
        if self.model is None:
            raise PreflightError("The policy has no model. Set policy.model, and call preflight() first.")
        request, spec = asked.request, asked.spec
        seed = spec.seed % 2**31 if self.seed == "episode" else self.seed
        body = {
            "model": self.model,
            "prompt": list(asked.prompt),
            "max_tokens": request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS,  # the engines' default is 16
            "return_token_ids": True,
            "logprobs": 1,
            "skip_special_tokens": False,  # some models mark tool calls with special tokens
            **sampling_of(request),
            **({"stop": list(request.stop_sequences)} if request.stop_sequences else {}),
            **({} if seed is None else {"seed": seed}),
            **self._extra_body,
        }
        response = await self.response_to(body, spec)
        if response.prompt_token_ids is not None and [*response.prompt_token_ids] != asked.prompt:
            raise MalformedResponseError(
                f"Expected the engine at {self._endpoint.base_url} to report the {len(asked.prompt)} "
                f"prompt token ids that it received, but it reported {len(response.prompt_token_ids)} other ids."
            )
        return response

    async def _chat(self) -> ChatTemplate:
        name = self.tokenizer or self.model or ""
        return await self.templates.of(name, self.chat_template, self.trust_remote_code)


def _as_chat(body: Any) -> Any:
    """Converts the body of an engine's response, so that the chat-completions parser can read it.

    Renames the fields with token ids, whose names differ between engines. Removes other fields that only engines send.
    """
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return body  # invalid: the reader reports the error
    choice = dict(choices[0])
    made = {name: value for name, value in body.items() if name not in ENGINE_KEYS}
    if (prompt := choice.get("prompt_token_ids")) is not None:
        made["prompt_token_ids"] = prompt
    if (sampled := choice.pop("response_token_ids", None)) is not None:
        choice["token_ids"] = sampled
    if isinstance(logprobs := choice.get("logprobs"), Mapping) and isinstance(logprobs.get("content"), list):
        choice["logprobs"] = {
            "content": [
                {**entry, "top_logprobs": []} if isinstance(entry, Mapping) else entry for entry in logprobs["content"]
            ]
        }
    made["choices"] = [{name: value for name, value in choice.items() if name not in CHOICE_KEYS}, *choices[1:]]
    return made


def _completion(body: Any) -> LLMResponse:
    choice = _choice(body)
    usage = optional(body, "usage", Mapping) or {}
    values: list[Any] | None = optional(optional(choice, "logprobs", Mapping) or {}, "token_logprobs", list)
    return LLMResponse.from_text(
        required(choice, "text", str),
        usage=Usage(optional(usage, "prompt_tokens", int) or 0, optional(usage, "completion_tokens", int) or 0),
        prompt_token_ids=list_of(choice, "prompt_token_ids", int),
        completion_token_ids=list_of(choice, "token_ids", int),
        logprobs=None if values is None else [float(typed(one, "token_logprobs[]", float, int)) for one in values],
        finish_reason=optional(choice, "finish_reason", str),
        model=optional(body, "model", str) or None,
        **_version_of(body),
    )


def _choice(body: Any) -> Mapping[str, Any]:
    choices = required(typed(body, "the response", Mapping), "choices", list)
    choice: Mapping[str, Any] = typed(choices[0] if choices else None, "choices[0]", Mapping)
    return choice


def _largest_logprob(body: Any) -> float:
    positions = required(required(_choice(body), "logprobs", Mapping), "top_logprobs", list)
    position = typed(positions[0] if positions else None, "top_logprobs[0]", Mapping)
    return max(float(typed(one, "top_logprobs[0]", float, int)) for one in position.values())


def _version_of(body: Any) -> dict[str, Any]:
    """Returns the fields `policy_version` and `policy_version_from` of a response, from the body of the engine.

    If the version changed during the response, joins all versions by `+`. SGLang reports `default` if no version was
    set, so `default` is ignored. Returns no fields if the body contains no version.
    """
    fields = body if isinstance(body, Mapping) else {}
    stated = fields.get("policy_version") or fields.get("weight_version")
    if stated is not None:
        origin = "header" if fields.get("policy_version_from") == "header" else "body"
        return {"policy_version": str(stated), "policy_version_from": origin}
    metadata = fields.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    spans = metadata.get("weight_versions")
    names = [span.get("version") for span in spans if isinstance(span, Mapping)] if isinstance(spans, list) else []
    found = list(dict.fromkeys(name for name in names or [metadata.get("weight_version")] if isinstance(name, str)))
    if not found or found == ["default"]:
        return {}
    return {"policy_version": "+".join(found), "policy_version_from": "metadata"}


class VllmPolicy(TokenEndpointPolicy):
    """Responds with a vLLM server.

    If the temperature is not 1, start the server with `--logprobs-mode processed_logprobs`, so that the
    log-probabilities refer to the sampling temperature.
    """

    option: ClassVar[str] = "vllm"


class SglangPolicy(TokenEndpointPolicy):
    """Responds with an SGLang server. `update` makes the server load weights from a directory."""

    option: ClassVar[str] = "sglang"

    async def send_weights(self, version: str, weights: Weights) -> None:
        """Makes the server load weights. `weights` has to be a directory that the server can read."""
        if not isinstance(weights, Path):
            raise ConfigError(
                "Expected new weights for policy=sglang as a directory of a saved model that its server can "
                f"read, got {type(weights).__name__}."
            )
        url = f"{self._endpoint.base_url.removesuffix('/v1')}/update_weights_from_disk"
        body = {"model_path": str(weights), "weight_version": version}
        await self._endpoint.post_apart(body, timeout_sec=self.timeout_sec, url=url)
