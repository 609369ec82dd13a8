"""A custom generate function for the trainer slime. It runs episodes in the rollout service.

```
--custom-generate-function-path ares_exp.training.slime.generate --custom-config-path ares.yaml
```

`ares.yaml` has the key `ares_exp`, with the `url` of the service, and optionally `key_env`, `policy` and other fields
of the submissions. `metadata.task` in each row of the data set is the name of a task. Written for slime 0.3.1.
"""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from ares_exp.training.client import Client, Episode, sampling_of
from ares_exp.training.sequences import NO_ROW

ABORT_POLL_SEC = 0.5


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Any]:
    """Runs an episode, and returns one sample per training row. If slime aborts the step, cancels the episode."""
    from slime.rollout.sglang_rollout import GenerateState

    state = GenerateState(args)
    options = dict(args.ares_exp)
    policy = {
        "wire": "sglang",
        "base_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1",
        "model": "default",
        "headers": {"X-SMG-Routing-Key": "{rollout_id}"},
        "sampling": sampling_of(sampling_params),
        **options.pop("policy", {}),
    }
    async with Client(options.pop("url"), key_env=options.pop("key_env", None)) as client:
        running = asyncio.ensure_future(client.run([sample.metadata["task"]], policy=policy, **options))
        try:
            while not running.done() and (evaluation or not state.aborted):
                await asyncio.wait({running}, timeout=ABORT_POLL_SEC)
            episode = running.result()[0] if running.done() else None
        finally:
            running.cancel()
            await asyncio.wait({running})
    return samples_of(episode, sample)


def samples_of(episode: Episode | None, sample: Any) -> list[Any]:
    """Returns one sample per training row of an episode, all with the same `rollout_id`.

    If the episode has no reward, its samples are masked and marked for removal.

    Args:
        episode: The episode; `None` if slime aborted it.
        sample: The sample from slime, which is copied for each row.
    """
    report = None if episode is None else episode.report
    lost = report is None or report.is_lost
    samples = []
    for row in (report.rows if report is not None else ()) or (NO_ROW,):
        made = copy(sample)
        made.tokens, made.response_length = list(row.ids), len(row.response_ids)
        made.loss_mask = list((row.untrained() if lost else row).response_mask)
        made.rollout_log_probs = list(row.response_logprobs)
        made.reward, made.remove_sample = row.reward or 0.0, lost
        made.weight_versions = list(row.policy_versions)
        made.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        statuses = type(sample).Status
        truncated = episode is not None and episode.state == "truncated"
        made.status = statuses.ABORTED if lost else statuses.TRUNCATED if truncated else statuses.COMPLETED
        samples.append(made)
    return samples
