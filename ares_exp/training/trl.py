"""Training with TRL's `GRPOTrainer` on the rollout service (`ares-exp serve`).

The service runs the episodes. The trainer samples all responses with its own model, through the relay of the service:

```
python -m ares_exp.training.trl --url http://127.0.0.1:8300 --model toy/model --output_dir checkpoints --max_steps 20
```

All arguments of TRL's `GRPOConfig` are options. Training continues from the newest checkpoint in `output_dir`, if any.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import AresExpError, UserError
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING
from ares_exp.policies.transformers_policy import as_it_generates
from ares_exp.training.client import BlockingClient, Client, Episode, Request, Response

LEASE_SEC = 60.0
"""Time in seconds without a call from the trainer after which the service cancels its rollouts."""


def columns_of(episodes: Sequence[Episode], pad: int) -> dict[str, list[Any]]:
    """Returns the columns that TRL expects from a `rollout_func`, with one row per episode.

    If an episode has several rows, uses the row with the most trained tokens. An episode that cannot be trained on has
    no reward, and a row with one prompt token and one response token with mask 0.

    Raises:
        UserError: No episode can be trained on.
    """
    if not any(episode.trainable for episode in episodes):
        errors = [f" The first error: {one.error.type}: {one.error.message}" for one in episodes if one.error] or [""]
        raise UserError(f"None of the {len(episodes)} episodes has a reward.{errors[0]}")
    made: list[tuple[Any, ...]] = []
    for episode in episodes:
        if episode.trainable and (rows := episode.report.rows):
            row = max(rows, key=lambda row: row.trained_tokens)
            parts = (row.prompt_ids, row.response_ids, row.response_logprobs, row.response_mask)
            made.append((*map(list, parts), episode.reward))
        else:
            made.append(([pad], [pad], [0.0], [0], None))
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "episode_reward")
    return {name: [*column] for name, column in zip(names, zip(*made, strict=True), strict=True)}


def episode_reward(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """Returns the column `episode_reward` unchanged. It only exists because TRL requires a reward function."""
    return episode_reward


class RolloutFunc:
    """A `rollout_func` of TRL's GRPO trainer. Each prompt of the data set is the name of a task.

    ```
    trainer = GRPOTrainer(model, reward_funcs=episode_reward, rollout_func=RolloutFunc(url), …)
    ```
    """

    def __init__(self, url: str, *, key_env: str | None = None, **submission: Any) -> None:
        """Stores the arguments of the client, and other fields of each submission, such as `limits`."""
        self._url, self._key_env, self._submission = url, key_env, submission

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """Runs one episode for each prompt. Returns the training rows as columns (see `columns_of`). Blocking."""
        return columns_of(asyncio.run(self._episodes(prompts, trainer)), trainer.processing_class.pad_token_id)

    async def _episodes(self, prompts: Sequence[str], trainer: Any) -> list[Episode]:
        step = trainer.state.global_step
        sampling = {**NEUTRAL_SAMPLING, "temperature": trainer.args.temperature}
        sampling["max_tokens"] = trainer.args.max_completion_length
        name = trainer.processing_class.name_or_path
        model = str(Path(name).absolute()) if Path(name).is_dir() else name  # the service has another working directory
        policy = {"mode": "relay", "model": model, "sampling": sampling}
        async with Client(self._url, key_env=self._key_env) as client:
            await client.versions(str(step), step)
            fields = {"lease_sec": LEASE_SEC, **self._submission, "policy": policy}
            return await client.run(prompts, sample=_Sampler(trainer), **fields)


class _Sampler:
    """Samples responses with the trainer's model. Concurrent requests are sampled as one batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._turns = asyncio.Lock()
        self._waiting: list[Request] = []
        self._sampled: dict[str, Response] = {}

    async def __call__(self, request: Request) -> Response:
        self._waiting.append(request)
        async with self._turns:
            while request.request_id not in self._sampled:
                await asyncio.sleep(0.005)  # so that concurrent requests join the batch
                size = self._trainer.args.per_device_train_batch_size
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                responses = await asyncio.to_thread(generate, self._trainer, batch)
                self._sampled |= {one.request_id: made for one, made in zip(batch, responses, strict=True)}
            return self._sampled.pop(request.request_id)


def generate(trainer: Any, requests: Sequence[Request]) -> list[Response]:
    """Samples a response to each request. It has no tokens if the prompt fills the model's context. Blocking."""
    context = trainer.model.config.get_text_config().max_position_embeddings
    version = str(trainer.state.global_step)
    fitting = [one for one in requests if len(one.prompt_ids) < context]
    sampled = iter(_sample(trainer, fitting, context) if fitting else ())
    responses = []
    for one in requests:
        tokens, logprobs, stop = next(sampled) if len(one.prompt_ids) < context else ([], [], "length")
        responses.append(Response(tokens, logprobs, version, stop))
    return responses


def _sample(trainer: Any, requests: Sequence[Request], context: int) -> Iterator[tuple[list[int], list[float], str]]:
    """Samples all responses as one batch. Yields token ids, log-probabilities and stop reason of each response."""
    import torch
    from transformers import GenerationConfig, LogitsProcessorList

    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    pad, own = tokenizer.pad_token_id, model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    temperature = requests[0].sampling["temperature"]
    width = max(len(one.prompt_ids) for one in requests)
    limits = [min(one.sampling["max_tokens"], context - width) for one in requests]
    padding = [width - len(one.prompt_ids) for one in requests]
    ids = [[pad] * left + [*one.prompt_ids] for left, one in zip(padding, requests, strict=True)]
    mask = [[0] * left + [1] * (width - left) for left in padding]
    chosen: list[tuple[list[int], list[float]]] = []

    def choose(_: Any, logits: Any) -> Any:
        distribution = torch.log_softmax(logits.float() / temperature, -1)
        tokens = torch.multinomial(distribution.exp(), 1)
        chosen.append((tokens[:, 0].tolist(), distribution.gather(-1, tokens)[:, 0].tolist()))
        return torch.full_like(logits, float("-inf")).scatter(-1, tokens, 0.0)

    settings = {"max_new_tokens": max(limits), "do_sample": False, "pad_token_id": pad, "eos_token_id": [*ends]}
    with as_it_generates(model, pad), torch.no_grad():
        model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=GenerationConfig(**settings),
            logits_processor=LogitsProcessorList([choose]),
        )
    for number, limit in enumerate(limits):
        row = [tokens[number] for tokens, _ in chosen[:limit]]
        end = next((place + 1 for place, token in enumerate(row) if token in ends), None)
        yield row[:end], [logprobs[number] for _, logprobs in chosen[:limit]][:end], "length" if end is None else "stop"


@dataclass
class Arguments:
    """The command-line options in addition to TRL's own options."""

    url: str = field(metadata={"help": "URL of the rollout service."})
    model: str = field(metadata={"help": "Directory of a saved model, or its name on the hub."})
    key_env: str | None = field(default=None, metadata={"help": "Environment variable with the key of the service."})


def main() -> None:
    """Trains a model on all tasks of the service."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from datasets import Dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer, TrlParser

    on_gpu = torch.cuda.is_available()
    parser = TrlParser((Arguments, GRPOConfig))
    parser.set_defaults(use_cpu=not on_gpu, bf16=on_gpu, logging_steps=1, lr_scheduler_type="constant")
    arguments, config = parser.parse_args_and_config()
    with BlockingClient(arguments.url, key_env=arguments.key_env) as client:
        names = [task.name for task in client.tasks()]
    groups = config.generation_batch_size // config.num_generations
    trainer = GRPOTrainer(
        arguments.model,
        args=config,
        reward_funcs=episode_reward,
        rollout_func=RolloutFunc(arguments.url, key_env=arguments.key_env),
        train_dataset=Dataset.from_dict({"prompt": names * -(-groups // len(names))}),  # a step needs `groups` rows
    )
    is_resumed = Path(config.output_dir).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir) if is_resumed else None)
    trainer.save_model()


if __name__ == "__main__":
    try:
        main()
    except AresExpError as error:
        sys.exit(str(error))
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. Run `pip install 'ares-exp[train]'`.")
