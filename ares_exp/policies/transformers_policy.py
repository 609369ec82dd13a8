"""The policy for a model in this process: any causal language model of transformers, on the CPU or a GPU."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import pydantic

from ares_exp.errors import ConfigError, ContextOverflowError, PreflightError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import WarnOnce
from ares_exp.policies.endpoint_policy import Count, ModelName, Seconds, StopSequences, Temperature, TopP
from ares_exp.policies.in_process.activations import Hook, KeptStates, StateWatcher
from ares_exp.policies.in_process.chat_template import ChatTemplate, with_template
from ares_exp.policies.in_process.loaded_model import LoadedModel, ModelInProcess
from ares_exp.policies.in_process.sampling import DEFAULT_MAX_OUTPUT_TOKENS, PROCESSED_LOGPROBS, Row, Sampling
from ares_exp.policies.in_process.token_client import TokenClient, TokenRequest, sampled_text
from ares_exp.policies.policy import EpisodeSpec, Policy, Weights

logger = logging.getLogger(__name__)


class TransformersPolicy(Policy):
    """Responds to requests with a model in this process, and returns the token ids.

    The model generates one response after the other. The policy's sampling parameters take precedence over the agent's.
    By default, the temperature is 1, and all tokens of the vocabulary can be sampled. The model's generation config is
    ignored. Log-probabilities refer to the whole vocabulary at the temperature of the response.
    """

    @pydantic.validate_call
    def __init__(
        self,
        *,
        model: ModelName | None,
        tokenizer: ModelName | None = None,
        chat_template: Path | None = None,
        device: ModelName = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        trust_remote_code: bool = False,
        temperature: Temperature | None = None,
        top_p: TopP | None = None,
        top_k: Count | None = None,
        max_output_tokens: Count | None = None,
        stop_sequences: StopSequences | None = None,
        seed: int | Literal["episode"] | None = "episode",
        continue_tokens: bool = True,
        timeout_sec: Seconds = 1800.0,
        policy_version: str | None = None,
        strict: bool = True,
        activations: list[int | KeptStates] | None = None,
        activations_max_bytes: Count = 2**30,
        hooks: list[Hook] | None = None,
        output_dir: Path | None = None,
    ) -> None:
        """Validates the settings. `preflight` or the first request loads the model.

        Args:
            model: Directory of a saved model, or its name on the Hugging Face hub. Required: `preflight` rejects
                `None`.
            tokenizer: Directory or hub name of the tokenizer. Default: the same as the model.
            chat_template: File with a chat template that replaces the tokenizer's template.
            device: `cpu`, `cuda`, `cuda:1`, `mps` or `auto`. `auto` selects the first available GPU, or the CPU if no
                GPU is available.
            dtype: Data type of the weights. `auto` uses the data type of the saved model.
            trust_remote_code: Whether code from the model's files may run.
            temperature: Sampling temperature; 0 selects the most likely token. A value takes precedence over the
                agent's value. `None` keeps the agent's value, or uses 1.
            top_p: Threshold for nucleus sampling. `None` keeps the agent's value, or samples from all tokens. Do not
                set it for training, because log-probabilities refer to the whole vocabulary.
            top_k: Number of most likely tokens to sample from. `None` keeps the agent's value, or samples from all
                tokens. Do not set it for training either.
            max_output_tokens: Maximum number of generated tokens of one response. `None` keeps the agent's value, or
                uses 2048. The model's context also limits the number.
            stop_sequences: Strings that end generation. The response does not include them.
            seed: Seed for sampling. `"episode"` uses the seed of the episode, and `None` a new random seed for each
                response. With a seed, the sampled tokens depend only on the seed, the prompt, and the number of earlier
                requests with this prompt.
            continue_tokens: Whether to continue conversations with the token ids of earlier responses. Each prompt then
                starts with exactly the earlier token ids. If it is not set, each request is rendered and tokenised
                completely.
            timeout_sec: Time limit of one response in seconds, including the wait for other responses.
            policy_version: Version of the loaded weights, which is recorded in responses.
            strict: Whether a request that forces a tool call causes an error. With `False`, it causes a warning, and
                the model chooses whether to call a tool. Forced tool calls are not supported.
            activations: Hidden states to save for each response. A layer number saves the outputs of this layer at the
                positions from which tokens were sampled. Other forms are `{layer: -1, positions: all}` and
                `{module: model.layers.0.mlp, positions: [0, 1]}`.
            activations_max_bytes: Maximum total size of the saved states in bytes. If the states of a response would
                exceed it, none of them are saved.
            hooks: Functions that receive hidden states in every forward pass, and may replace them:
                `{layer: 3, function: my_module.steer}`.
            output_dir: Directory of the run. States are saved in its subdirectory `activations`.
        """
        self._model = self.model_name = model
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._device = device
        self._dtype = dtype
        self._trust_remote_code = trust_remote_code
        self._sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_output_tokens": max_output_tokens,
            "stop_sequences": stop_sequences,
        }
        self._seed = seed
        self._continue_tokens = continue_tokens
        self._timeout_sec = timeout_sec
        self._version = policy_version
        self._strict = strict
        kept = [KeptStates(layer=one) if isinstance(one, int) else one for one in activations or ()]
        self._watcher = StateWatcher(kept, hooks or (), output_dir, activations_max_bytes)
        self._given: tuple[Any, Any] | None = None
        self._running: ModelInProcess | None = None
        self._without_episode: LLMClient | None = None
        self._warn_once = WarnOnce(logger)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, name: str = "in memory", **settings: Any) -> Self:
        """Creates a policy for a model that the caller has already loaded. `close` does not affect this model.

        While responses are generated, the model is in evaluation mode, and other code must not change it. Use `update`
        to change the weights.

        Args:
            model: Causal model of transformers.
            tokenizer: Tokenizer of the model, with a chat template.
            name: Name of the model for the records.
            settings: Other arguments of the constructor.
        """
        made = cls(model=name, **settings)
        made._given = (model, tokenizer)
        return made

    @property
    def policy_version(self) -> str | None:
        """Version of the current weights."""
        return self._version if self._running is None else self._running.version

    async def preflight(self) -> None:
        """Loads the model.

        Raises:
            PreflightError: The model cannot be loaded, or has no chat template. The message suggests a fix.
        """
        await self._model_in_process().loaded()

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client for one episode. The options `seed` and `continue_tokens` determine its seed and prompts."""
        return TokenClient(
            spec=episode,
            load=self._chat,
            prepare=self._with_own_settings,
            sample=self._sample,
            warn=self._warn_once,
            strict=self._strict,
            continues=self._continue_tokens,
        )

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request outside of episodes. The option `seed="episode"` then means seed 0."""
        self._without_episode = self._without_episode or self.for_episode(EpisodeSpec("", 0))
        return await self._without_episode(request)

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Updates the weights; see `UpdatablePolicy.update`.

        A directory must have the format of `save_pretrained`, with `*.safetensors` files.
        """
        await self._model_in_process().update(version, lambda loaded: _take(loaded.model, weights))

    async def close(self) -> None:
        """Cancels running responses. Frees the memory of the model if the policy has loaded it. Idempotent."""
        running, self._running = self._running, None
        self._without_episode = None
        if running is not None:
            if self._given is not None:
                self._version = running.version
            await running.close()

    async def _chat(self) -> ChatTemplate:
        return (await self._model_in_process().loaded()).template

    async def _sample(self, asked: TokenRequest) -> LLMResponse:
        started = time.perf_counter()
        running = self._model_in_process()
        loaded = await running.loaded()
        seed = asked.spec.seed if self._seed == "episode" else self._seed
        sampling = self._sampling_of(asked.request, loaded, len(asked.prompt))
        row = Row(asked.prompt, sampling, asked.spec, Random(None if seed is None else f"{seed}/{asked.name}"))
        version, kept = await running.generate(row, timeout_sec=self._timeout_sec)
        return LLMResponse.from_text(
            sampled_text(loaded.template, row.ids, loaded.ends, sampling.stop),
            usage=Usage(len(asked.prompt), len(row.ids)),
            prompt_token_ids=asked.prompt,
            completion_token_ids=row.ids,
            logprobs=row.logprobs,
            finish_reason=row.finish,
            model=self.model_name,
            latency_sec=time.perf_counter() - started,
            sampling={**sampling.to_dict(), **PROCESSED_LOGPROBS, **({} if seed is None else {"seed": seed})},
            policy_version=version,
            activations=kept,
        )

    def _model_in_process(self) -> ModelInProcess:
        if self._running is None:
            self._running = ModelInProcess(self._load, version=self._version, watcher=self._watcher)
        return self._running

    def _load(self) -> LoadedModel:
        model, tokenizer = self._given or _from_disk(
            self._model, self._tokenizer or self._model, self._device, self._dtype, self._trust_remote_code
        )
        tokenizer = with_template(tokenizer, self.model_name, self._chat_template)
        self._watcher.check(model)
        template = ChatTemplate(tokenizer)
        own = model.generation_config.eos_token_id
        ends = {*template.ends, *(own if isinstance(own, list | tuple) else [own])} - {None}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        context = model.config.get_text_config().to_dict().get("max_position_embeddings")
        return LoadedModel(model, template, pad or 0, frozenset(ends), context)

    def _with_own_settings(self, request: LLMRequest) -> LLMRequest:
        ours: dict[str, Any] = {name: value for name, value in self._sampling.items() if value is not None}
        return replace(request, stream=False, **ours)

    def _sampling_of(self, request: LLMRequest, loaded: LoadedModel, prompt_tokens: int) -> Sampling:
        left = None if loaded.max_tokens is None else loaded.max_tokens - prompt_tokens
        if left is not None and left < 1:
            raise ContextOverflowError(
                f"The prompt has {prompt_tokens} tokens, but {self.model_name} supports at most {loaded.max_tokens}."
            )
        wanted = request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS
        return Sampling(
            max_tokens=wanted if left is None else min(wanted, left),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k,
            stop=list(request.stop_sequences or ()),
        )


def _from_disk(model: str | None, tokenizer: str | None, device: str, dtype: str, trusted: bool) -> tuple[Any, Any]:
    """Loads a model and its tokenizer. Raises `PreflightError` if one of them, or a required package, is missing."""
    if model is None or tokenizer is None:
        raise PreflightError("`policy.model` is required and has no default. Set `policy.model=…`.")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise PreflightError(
            "policy=transformers needs torch and transformers: pip install 'ares-exp[transformers]'."
        ) from None
    try:
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        place = torch.device(best if device == "auto" else device)
        found = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trusted)
        with _no_progress_bars():
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=trusted).to(place)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise PreflightError(
            f"Cannot load policy.model={model} on device {device}. Use the directory of a saved causal "
            f"model, or its name on the hub: {error}"
        ) from None
    return loaded.eval(), found


def _take(model: Any, weights: Weights | None) -> None:
    """Loads new weights into a model. If they do not fit, raises `ConfigError` and does not change the model."""
    if weights is None:
        return
    if isinstance(weights, Path):
        from safetensors.torch import load_file

        files = sorted(weights.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"Expected a directory of a saved model with *.safetensors, got {weights}.")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if not isinstance(weights, Mapping):
        weights()
        return
    own = model.state_dict()
    for name, tensor in weights.items():
        if name not in own:
            raise ConfigError(f"The model has no weights named {name!r}. Its weights are: {', '.join(own):.200}…")
        if own[name].shape != tensor.shape:
            raise ConfigError(
                f"Expected the weights {name!r} to have the shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}."
            )
    model.load_state_dict(weights, strict=False)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hides the progress bars of transformers, because the terminal shows the progress of the run."""
    from transformers.utils import logging as library_logging

    was_shown = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            library_logging.enable_progress_bar()
