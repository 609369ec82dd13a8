"""The policy for a model in this process: any causal language model of transformers, on the CPU or a GPU.

A thread generates one response at a time. Functions import torch and transformers only when they need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import pydantic

from ares_exp.cancellation import finish, in_thread, result_of
from ares_exp.errors import (
    AresExpError,
    ConfigError,
    ContextOverflowError,
    PolicyError,
    PolicyTimeoutError,
    PreflightError,
)
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import WarnOnce
from ares_exp.policies.endpoint_policy import Count, ModelName, Seconds, StopSequences, Temperature, TopP
from ares_exp.policies.in_process.activations import Hook, KeptStates, StateWatcher
from ares_exp.policies.in_process.chat_template import ChatTemplate, with_template
from ares_exp.policies.in_process.sampling import (
    DEFAULT_MAX_OUTPUT_TOKENS,
    PROCESSED_LOGPROBS,
    Row,
    Sampling,
    choose,
)
from ares_exp.policies.in_process.token_client import TokenClient, TokenRequest, sampled_text
from ares_exp.policies.policy import EpisodeSpec, Policy, Weights
from ares_exp.policies.waiting import OnWait, nobody_waits, reported

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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        pad: Id of the padding token.
        ends: Ids of the tokens that end a response.
        max_tokens: Length of the model's context; `None` if it is unlimited.
    """

    model: Any
    template: ChatTemplate
    pad: int
    ends: frozenset[int]
    max_tokens: int | None


@dataclass(eq=False, slots=True)
class _Update:
    version: str
    apply: Callable[[LoadedModel], None]
    error: Exception | None = None


class ModelInProcess:
    """A model that is loaded at its first use, and freed by `close`. Use each instance on only one event loop.

    Attributes:
        version: Version of the weights.
    """

    def __init__(self, load: Callable[[], LoadedModel], *, version: str | None, watcher: StateWatcher) -> None:
        """Stores the arguments. The first use of the model calls `load` in a thread."""
        self.version = version
        self._load = load
        self._watcher = watcher
        self._turns = asyncio.Lock()
        self._model: LoadedModel | None = None
        self._updates: list[_Update] = []
        self._row: Row | None = None
        self._is_closed = False

    async def loaded(self) -> LoadedModel:
        """Returns the model, after loading it if necessary.

        Raises:
            AresExpError: The model could not be loaded.
        """
        if self._model is not None:
            return self._model
        async with self._turn(nobody_waits) as model:
            return model

    async def generate(self, row: Row, *, timeout_sec: float) -> tuple[str | None, Any]:
        """Generates the tokens of a response, and appends them to `row`.

        Returns the version of the weights, and the files of the response's states (`StateWatcher.save`).

        If the caller is cancelled, generation ends at the next token. `timeout_sec` includes the time to wait until
        other responses are complete.

        Raises:
            PolicyError: The response could not be generated.
        """
        try:
            async with asyncio.timeout(timeout_sec), self._turn(row.spec.on_wait) as model:
                self._row = row
                working = asyncio.ensure_future(asyncio.to_thread(self._generated, model, row))
                try:
                    return await result_of(working)
                finally:
                    row.given_up.set()
                    await finish(asyncio.wait_for(working, None))
        except TimeoutError:
            raise PolicyTimeoutError(
                f"The model did not respond within {timeout_sec:g} s. Raise policy.timeout_sec, or lower "
                "policy.max_output_tokens."
            ) from None

    async def update(self, version: str, apply: Callable[[LoadedModel], None]) -> None:
        """Changes the weights as soon as no response is being generated. `apply` receives the model and changes it.

        Responses that wait for the model meanwhile use the new weights.

        Raises:
            AresExpError: `apply` failed.
        """
        update = _Update(version, apply)
        self._updates.append(update)
        async with self._turn(nobody_waits):
            pass
        if update.error is not None:
            raise update.error

    async def close(self) -> None:
        """Ends the response that is being generated, and frees the model. Idempotent."""
        self._is_closed = True
        if self._row is not None:
            self._row.given_up.set()
        async with self._turns:
            self._model = None
        await in_thread(_release)

    @contextlib.asynccontextmanager
    async def _turn(self, on_wait: OnWait) -> AsyncIterator[LoadedModel]:
        """Gives the caller exclusive use of the model. Loads it if necessary, and applies waiting updates first."""
        with reported(on_wait):
            await self._turns.acquire()
        try:
            if self._is_closed:
                raise PolicyError("The policy is closed.")
            if self._model is None:
                self._model = await in_thread(self._load)
            model = self._model
            if self._updates:
                await in_thread(lambda: self._apply_updates(model))
            yield model
        finally:
            self._turns.release()

    def _apply_updates(self, model: LoadedModel) -> None:
        while self._updates:
            update = self._updates.pop(0)
            try:
                update.apply(model)
            except Exception as error:
                update.error = _as_policy_error(error)
            else:
                self.version = update.version

    def _generated(self, model: LoadedModel, row: Row) -> tuple[str | None, Any]:
        try:
            generate(model, row, self._watcher)
            if row.finish is None:
                raise PolicyError("The policy is closed.")
            return self.version, self._watcher.save(row.spec)
        except Exception as error:
            raise _as_policy_error(error) from None


def _as_policy_error(error: Exception) -> Exception:
    if isinstance(error, AresExpError):
        return error
    return PolicyError(f"The model failed: {type(error).__name__}: {error}")


def _release() -> None:
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate(loaded: LoadedModel, row: Row, watcher: StateWatcher) -> None:
    """Generates tokens and appends them to `row`, until the response ends or the caller gives it up.

    Raises:
        PolicyError: The model's logits contain NaN, or the memory is insufficient.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    model = loaded.model
    ids = torch.tensor([[*row.prompt]], device=model.device)
    longest = GenerationConfig(max_new_tokens=row.sampling.max_tokens, do_sample=False, pad_token_id=loaded.pad)

    def choose_token(_: Any, logits: Any) -> Any:
        """Chooses the next token. Returns scores that make transformers, which decodes greedily, select this token."""
        token, logprob = choose(logits[0], row)
        if math.isnan(logprob):
            raise PolicyError("The logits of the model contain NaN. Check its weights.")
        if not row.given_up.is_set():
            row.take(token, logprob, loaded.ends, loaded.template.decode)
        scores = logits.new_full(logits.shape, -math.inf)
        scores[0, token] = 0.0
        return scores

    def has_ended(*_: Any, **__: Any) -> Any:
        return torch.tensor([row.finish is not None or row.given_up.is_set()], device=model.device)

    try:
        with as_it_generates(model, loaded.pad), torch.no_grad(), watcher.watching(model, row):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=longest,
                logits_processor=LogitsProcessorList([choose_token]),
                stopping_criteria=StoppingCriteriaList([has_ended]),
            )
    except torch.OutOfMemoryError as error:
        raise PolicyError(
            f"A prompt of {len(row.prompt)} tokens and its response do not fit into the memory of {model.device}: "
            f"{error}"
        ) from None


@contextlib.contextmanager
def as_it_generates(model: Any, pad: int) -> Iterator[None]:
    """Sets evaluation mode, and disables the model's own sampling defaults. Restores both when the context exits."""
    from transformers import GenerationConfig

    defaults, is_training = model.generation_config, model.training
    model.generation_config = GenerationConfig(pad_token_id=pad)
    model.eval()
    try:
        yield
    finally:
        if is_training:
            model.train()
        model.generation_config = defaults
