"""Gymnasium ids for the environments of this package. Importing this module registers the ids, and imports gymnasium.

```python
import gymnasium

env = gymnasium.make("ares_exp.gym:ares_exp/Harbor-v0", path="tasks", container="local", step_limit=50)
```

The part before the colon makes Gymnasium import this module, so no other import is needed. If your program imports
`ares_exp.gym`, you can omit this part (`"ares_exp/Harbor-v0"`). The ids are:

- `ares_exp/Harbor-v0`: Harbor tasks, from a folder (`path=`), a registry (`registry=`, `dataset=`) or git (`repo=`,
  `git_url=`). Accepts the options of `env=harbor` and the arguments of `ares_exp.wrappers.PresetGym`. The next two ids
  accept the options of their `env` in the same way.
- `ares_exp/SWEBench-v0`: `dataset="rows.jsonl", container="docker"`.
- `ares_exp/TwentyQuestions-v0`: without a container.
- `ares_exp/Preset-v0`: any preset that `ares_exp.make` accepts (`preset="harbor:0"`), with the options of its `env`.

To create vector environments, use `gymnasium.make_vec`, or a class of Gymnasium with functions such as
`functools.partial(PresetGym, preset="harbor", path=…)`. `SyncVectorEnv` runs one environment after the other.
`AsyncVectorEnv` runs each environment in a separate process. It requires `shared_memory=False`, because shared memory
cannot contain chat requests (`make_vec(…, vector_kwargs={"shared_memory": False})`). `reset(seed=s)` passes the seeds
s, s+1, … to the environments. Without a seed, all environments run the same tasks in the same order.

The autoreset mode determines what happens at the end of an episode:

- `NEXT_STEP`, the default: The last step returns the last reward and the empty request. The next step ignores its
  action, starts an episode and has reward 0. With `shared_memory=False`, do not call `reset()` between these two steps.
  Because of a bug in Gymnasium 1.4, the step after `reset()` would ignore its action and start another episode.
- `SAME_STEP`: The last step returns the last reward and the first request of the new episode. The last observation and
  `info` of the old episode are in `infos["final_obs"]` and `infos["final_info"]`.
- `DISABLED`: Like `NEXT_STEP`, but you call `reset(options={"reset_mask": ended})` before the next step.
"""

from __future__ import annotations

import gymnasium

IDS: dict[str, dict[str, str]] = {
    "ares_exp/Harbor-v0": {"preset": "harbor"},
    "ares_exp/SWEBench-v0": {"preset": "swebench"},
    "ares_exp/TwentyQuestions-v0": {"preset": "twenty_questions"},
    "ares_exp/Preset-v0": {},
}
"""Gymnasium ids, each with the arguments of `PresetGym` that the id implies."""


def register() -> None:
    """Registers the ids of this package with Gymnasium. Does nothing for ids that are already registered."""
    for one, arguments in IDS.items():
        if one not in gymnasium.registry:
            entry_point = "ares_exp.wrappers.preset_gym:PresetGym"
            gymnasium.register(one, entry_point=entry_point, nondeterministic=True, kwargs=arguments)


register()
