"""OpenEnv sessions that run episodes in the rollout service, for example for TRL's asynchronous GRPO trainer.

```
factory = partial(EpisodeSessions, "http://127.0.0.1:8300", policy={"base_url": engine, "model": model})
worker = HarnessRolloutWorker(harness_session_factory=factory, …)      # trl.experimental.async_grpo
```

The classes have the methods of `ResourceSessionFactory` and `TrainableSession` of OpenEnv 0.10, which TRL 1.16 calls.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.training.client import BlockingClient, Episode, sampling_of
from ares_exp.training.service.bodies import Submitted


class EpisodeSessions:
    """Creates one session per episode. The argument `task` is a task name, or messages that end with a task name."""

    def __init__(
        self, url: str, *, policy: Mapping[str, Any], sampling: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Stores the arguments.

        Args:
            url: URL of the service.
            policy: Field `policy` of the submissions.
            sampling: Sampling parameters from the trainer, which become `policy.sampling`.
            options: `key_env` of the client, and other fields of the submissions, such as `limits`.
        """
        self._url, self._key_env = url, options.pop("key_env", None)
        self._fields = {**options, "want": "calls", "policy": {**policy, "sampling": sampling_of(sampling or {})}}

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> EpisodeSession:
        """Submits a rollout, and returns its session. If `episode_id` was submitted before, uses that rollout again."""
        name = task if isinstance(task, str) else task[-1]["content"]
        ids = None if episode_id is None else [episode_id]
        client = BlockingClient(self._url, key_env=self._key_env)
        try:
            return EpisodeSession(client, client.submit([name], rollout_ids=ids, seed=seed, **self._fields))
        except BaseException:
            client.close()
            raise


class EpisodeSession:
    """A session of one episode. The trainer only waits for the service's result. Any thread may close the session."""

    def __init__(self, client: BlockingClient, submitted: Submitted) -> None:
        self._client, self._submitted = client, submitted
        self._episode: Episode | None = None
        self._waiting = threading.Lock()

    def initial_messages(self) -> list[dict[str, Any]]:
        """Returns an empty list, because the agent writes its own prompts."""
        return []

    def list_tools(self) -> list[Any]:
        """Returns an empty list, because the agent has its own tools."""
        return []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Raises `NotImplementedError`, because the session offers no tools."""
        raise NotImplementedError(f"Cannot call the tool {name!r}: the agent runs by itself.")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Waits until the episode ends. Returns the exit code of the agent: 0 if it finished, otherwise 1.

        Raises:
            TimeoutError: The time limit was exceeded. The episode is cancelled, and its LLM calls so far are kept.
        """
        return int(self._ended(timeout_s).state != "finished")

    def fetch_training_trace(self) -> Any:
        """Returns the LLM calls of the episode with their tokens, as a `TrainingTrace`."""
        from openenv.core.harness import TrainingTrace, TrainingTurn

        turns = []
        for number, call in enumerate(self._ended().sampled_calls):
            prompt, sampled, logprobs = list(call.prompt), list(call.completion), list(call.logprobs)
            ids = {"prompt_token_ids": prompt, "completion_token_ids": sampled}
            mask = [0] * len(prompt) + [1] * len(sampled)
            turns.append(TrainingTurn(node_id=str(number), **ids, per_token_logps=logprobs, loss_mask=mask))
        return TrainingTrace(turns=turns)

    def verify(self, transcript: Sequence[Any], final_state: Any = None) -> Any:
        """Returns a `VerifyResult` with the reward of the episode; `None` if the episode must not be trained on."""
        from openenv.core.harness import VerifyResult

        episode = self._ended()
        reward = episode.reward if episode.trainable else None
        return VerifyResult(env_reward=reward, done=True, metrics={"state": episode.state, **episode.rewards})

    def close(self) -> None:
        """Cancels the episode if it has not ended, and closes the connection. Idempotent."""
        try:
            if self._episode is None:
                self._client.cancel(self._submitted)
                self._ended()
        finally:
            self._client.close()

    def _ended(self, timeout_s: float | None = None) -> Episode:
        with self._waiting:
            if self._episode is None:
                try:
                    [self._episode] = self._client.collect(self._submitted, timeout_sec=timeout_s)
                except TimeoutError:
                    self._client.cancel(self._submitted, keep="calls")
                    [self._episode] = self._client.collect(self._submitted)
                    raise
            return self._episode
