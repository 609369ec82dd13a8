"""An agent loop for verl that runs episodes in the rollout service, and training sequences in verl's format.

```
- name: ares_exp                                       # a file for rollout.agent.agent_loop_config_path
  _target_: ares_exp.training.verl.EpisodeAgentLoop
  url: http://127.0.0.1:8300
  model: /models/policy
```

The fields match `AgentLoopOutput` of verl 0.9.1. Importing this module does not import verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ares_exp.errors import UntrainableError
from ares_exp.training.client import Client, Request, Response, sampling_of
from ares_exp.training.sequences import NO_ROW, Lost, SequenceReport, TrainingSequence

ABORTED = ("aborted", "abort")
"""Stop reasons that verl reports for a response that a weight update interrupted."""


class EpisodeAgentLoop:
    """An agent loop (`AgentLoopBase`) that runs an episode per prompt, and samples with verl's own server manager.

    The data set needs a column `task` with the name of a task.
    """

    def __init__(
        self,
        server_manager: Any,
        url: str,
        model: str,
        *,
        key_env: str | None = None,
        lost: Lost = "mask",
        submission: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Stores the arguments. verl also passes further arguments, which are ignored.

        Args:
            server_manager: Client of verl's inference servers.
            url: URL of the rollout service.
            model: Directory or hub name of the model, whose tokenizer the service uses.
            key_env: Environment variable with the service's key.
            lost: Treatment of an episode without a reward, as for `agent_loop_outputs`.
            submission: Other fields of the submissions, such as `limits`.
        """
        self._server_manager = server_manager
        self._url, self._key_env, self._lost = url, key_env, lost
        self._model = model
        self._submission: Any = OmegaConf.to_container(OmegaConf.create(dict(submission or {})))

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> list[Any]:
        """Runs an episode. Returns one `AgentLoopOutput` per training row."""
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        async def sample(request: Request) -> Response:
            output = await self._server_manager.generate(
                request.rollout_id,
                prompt_ids=list(request.prompt_ids),
                sampling_params={**request.sampling, **sampling_params, "logprobs": True},
            )
            steps = [output.extra_fields.get(f"{name}_global_steps") for name in ("min", "max")]
            versions = dict.fromkeys(str(step) for step in steps if step is not None)
            is_long = not output.token_ids or len(output.token_ids) >= request.sampling["max_tokens"]
            stop = "abort" if output.stop_reason in ABORTED else "length" if is_long else "stop"
            return Response(output.token_ids, output.log_probs, "+".join(versions) or None, stop)

        policy = {"mode": "relay", "model": self._model, "sampling": sampling_of(sampling_params)}
        async with Client(self._url, key_env=self._key_env) as client:
            [episode] = await client.run([str(row["task"])], sample=sample, policy=policy, **self._submission)
        step = row.get("global_steps")
        outputs = agent_loop_outputs(episode.report, lost=self._lost, global_step=None if step is None else int(step))
        return [AgentLoopOutput(**fields) for fields in outputs]


def agent_loop_output(report: SequenceReport, *, lost: Lost = "mask", global_step: int | None = None) -> dict[str, Any]:
    """Returns the fields of an `AgentLoopOutput` for an episode with one row.

    `agent_loop_outputs` describes the arguments and further errors.

    Raises:
        UntrainableError: The episode has several rows. Use `agent_loop_outputs` instead.
    """
    outputs = agent_loop_outputs(report, lost=lost, global_step=global_step)
    if len(outputs) > 1:
        row = report.rows[0]
        raise UntrainableError(
            f"Expected episode {row.episode_id} ({row.task}) to have one training row, got {len(outputs)}, of which "
            f"{report.made['forked']} are forks. If the trainer accepts a list, return all rows with "
            "`agent_loop_outputs`. Otherwise, prevent the agent from rewriting its history."
        )
    return outputs[0]


def agent_loop_outputs(
    report: SequenceReport, *, lost: Lost = "mask", global_step: int | None = None
) -> list[dict[str, Any]]:
    """Returns the fields of one `AgentLoopOutput` per row, for trainers of verl that accept a list of outputs.

    Args:
        report: The rows of an episode.
        lost: Treatment of an episode without a reward. `mask` returns its rows with a mask of zeros, but their reward
            of 0.0 still counts in the mean of verl's prompt group. `group` raises an error, so that verl drops the
            whole group.
        global_step: Number of the current training step, from which verl computes the age of rows without a policy
            version.

    Raises:
        UntrainableError: The episode has no reward and `lost` is `group`, a policy version is not an integer, or a
            trained row has neither a policy version nor a `global_step`.
    """
    if report.is_lost and lost == "group":
        name = f"Episode {report.rows[0].episode_id} ({report.rows[0].task})" if report.rows else "The episode"
        raise UntrainableError(f'{name} has no reward, so its group is dropped. To mask its rows, use lost="mask".')
    rows = [row.untrained() for row in report.rows or (NO_ROW,)] if report.is_lost else report.rows
    return [_fields(row, global_step) for row in rows]


def _fields(row: TrainingSequence, global_step: int | None) -> dict[str, Any]:
    try:
        steps = [int(version) for version in row.policy_versions]
    except ValueError:
        raise UntrainableError(
            f"Expected the policy versions of episode {row.episode_id} ({row.task}) to be global steps of verl, got "
            f"{', '.join(row.policy_versions)}. Make the endpoint report the step as `policy_version`."
        ) from None
    if not steps and global_step is None and any(row.mask):
        raise UntrainableError(
            f"Episode {row.episode_id} ({row.task}) has no policy versions. Make the endpoint report the step as "
            "`policy_version`, or pass `global_step`."
        )
    steps = steps or [global_step or 0]
    return {
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "response_mask": list(row.response_mask),
        "response_logprobs": list(row.response_logprobs),
        "reward_score": row.reward or 0.0,
        "num_turns": 2 * len(row.steps),
        "metrics": {},
        "extra_fields": {
            "reward_extra_info": {"scored": float(row.reward is not None)},  # the same keys in all rows; not `reward`
            "rewards": dict(row.rewards),
            "policy_versions": list(row.policy_versions),
            "conversation": row.conversation,
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
        },
    }
