"""Registration of environment ids with Gymnasium. Importing this module registers them, and imports gymnasium.

```python
import gymnasium

env = gymnasium.make("ares_exp.gym:ares_exp/Harbor-v0", path="tasks", container="local", step_limit=50)
```

The part before the colon makes Gymnasium import this module, so no other import is needed. With `import
ares_exp.gym` somewhere, `"ares_exp/Harbor-v0"` alone is enough. The ids:

- `ares_exp/Harbor-v0`: Harbor tasks, from a folder (`path=`), a registry (`registry=`, `dataset=`) or git (`repo=`,
  `git_url=`). These options, and all others, are those of `env=harbor`, beside the arguments of
  `ares_exp.wrappers.source_gym.SourceGym`; so it is with the two that follow.
- `ares_exp/SWEBench-v0`: `dataset="rows.jsonl", container="docker"`.
- `ares_exp/TwentyQuestions-v0`: without a container.
- `ares_exp/Preset-v0`: `preset="harbor:0"`, whatever `ares_exp.make` takes.

Vector environments, by `gymnasium.make_vec` or from `functools.partial(HarborGym, path=…)`: `SyncVectorEnv` plays one
environment after the other, `AsyncVectorEnv` each in a process of its own. The latter needs `shared_memory=False`, as
shared memory cannot hold chat requests (`make_vec(…, vector_kwargs={"shared_memory": False})`). `reset(seed=s)` gives
the environments the seeds s, s+1, …; without one they all play the same tasks. What happens at the end of an episode:

- `NEXT_STEP`, the default: the step that ends it returns the last reward and the empty request; the next step ignores
  its action, starts an episode and has reward 0. Do not call `reset()` between the two with `shared_memory=False`:
  Gymnasium 1.4 forgets it, and the next step starts one more episode instead of playing the action.
- `SAME_STEP`: that step returns the last reward and the new episode's first request; the end of the old one is in
  `infos["final_obs"]` and `infos["final_info"]`.
- `DISABLED`: as `NEXT_STEP`, but before the next step you call `reset(options={"reset_mask": ended})` yourself.
"""

from __future__ import annotations

import gymnasium

IDS = {
    "ares_exp/Harbor-v0": "ares_exp.wrappers.harbor_gym:HarborGym",
    "ares_exp/SWEBench-v0": "ares_exp.wrappers.swebench_gym:SweBenchGym",
    "ares_exp/TwentyQuestions-v0": "ares_exp.wrappers.twenty_questions_gym:TwentyQuestionsGym",
    "ares_exp/Preset-v0": "ares_exp.wrappers.preset_gym:PresetGym",
}
"""Environment ids and the classes behind them."""


def register() -> None:
    """Registers the ids of this package with Gymnasium; may be called more than once."""
    for one, entry_point in IDS.items():
        if one not in gymnasium.registry:
            gymnasium.register(one, entry_point=entry_point, nondeterministic=True)


register()
