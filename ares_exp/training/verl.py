"""Training sequences as verl's agent loops return them.

```
class OurEpisodes(AgentLoopBase):                      # verl.experimental.agent_loop
    async def run(self, sampling_params, **kwargs):
        report = sequences_of(await run(kwargs["task"]))
        return AgentLoopOutput(**agent_loop_output(report))
```

The fields match `AgentLoopOutput` of verl 0.9. This module does not import verl.
"""

from __future__ import annotations

from typing import Any

from ares_exp.errors import UntrainableError
from ares_exp.training.sequences import SequenceReport, TrainingSequence


def agent_loop_output(report: SequenceReport) -> dict[str, Any]:
    """Returns the fields of the single output of an episode whose history was not rewritten.

    Raises:
        UntrainableError: The episode has no reward, or has several rows. Use `agent_loop_outputs` for several rows.
    """
    outputs = agent_loop_outputs(report)
    if len(outputs) > 1:
        row = report.rows[0]
        raise UntrainableError(
            f"Expected one row of episode {row.episode_id} ({row.task}), got {len(outputs)}, {report.forked} of them "
            "forked. Return all, from `agent_loop_outputs`, where the trainer takes a list; or keep the agent from "
            "rewriting its history."
        )
    return outputs[0]


def agent_loop_outputs(report: SequenceReport) -> list[dict[str, Any]]:
    """Returns the fields of one output per row, for trainers of verl that accept a list from an agent loop.

    Raises:
        UntrainableError: The episode has no reward.
    """
    return [_fields(row) for row in report.rows]


def _fields(row: TrainingSequence) -> dict[str, Any]:
    return {
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "response_mask": list(row.response_mask),
        "response_logprobs": list(row.response_logprobs),
        "reward_score": row.known_reward(),
        "num_turns": 2 * len(row.steps),
        "metrics": {},
        "extra_fields": {
            "reward_extra_info": dict(row.rewards),
            "policy_versions": list(row.policy_versions),
            "conversation": row.conversation,
        },
    }
