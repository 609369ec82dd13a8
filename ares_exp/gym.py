"""Registration of environment ids with Gymnasium. Importing this module registers them, and imports gymnasium.

```python
import gymnasium

env = gymnasium.make("ares_exp.gym:ares_exp/Harbor-v0", path="tasks", container="local", step_limit=50)
```

The part before the colon makes Gymnasium import this module, so no other import is needed. With `import
ares_exp.gym` somewhere, `"ares_exp/Harbor-v0"` alone is enough. The ids:

- `ares_exp/Harbor-v0`: Harbor tasks, from a folder (`path=`), a registry (`registry=`, `dataset=`) or git (`repo=`,
  `git_url=`). These options, and all others, are those of `env=harbor`, in addition to the arguments of
  `ares_exp.wrappers.PresetGym`. The two ids that follow work in the same way.
- `ares_exp/SWEBench-v0`: `dataset="rows.jsonl", container="docker"`.
- `ares_exp/TwentyQuestions-v0`: without a container.
- `ares_exp/Preset-v0`: `preset="harbor:0"`, whatever `ares_exp.make` takes, with the options of its `env`.

Vector environments, by `gymnasium.make_vec` or from
`functools.partial(PresetGym, preset="harbor", path=…)`: `SyncVectorEnv` runs one
environment after the other, `AsyncVectorEnv` each in a process of its own. The latter needs `shared_memory=False`, as
shared memory cannot hold chat requests (`make_vec(…, vector_kwargs={"shared_memory": False})`). `reset(seed=s)` gives
the environments the seeds s, s+1, …; without one they all run the same tasks. What happens at the end of an episode:

- `NEXT_STEP`, the default: the step that ends it returns the last reward and the empty request; the next step ignores
  its action, starts an episode and has reward 0. Do not call `reset()` between the two with `shared_memory=False`:
  Gymnasium 1.4 forgets it, and the next step starts one more episode instead of running the action.
- `SAME_STEP`: that step returns the last reward and the new episode's first request; the end of the old one is in
  `infos["final_obs"]` and `infos["final_info"]`.
- `DISABLED`: as `NEXT_STEP`, but before the next step you call `reset(options={"reset_mask": ended})` yourself.
"""

from __future__ import annotations

import gymnasium

IDS: dict[str, dict[str, str]] = {
    "ares_exp/Harbor-v0": {"preset": "harbor"},
    "ares_exp/SWEBench-v0": {"preset": "swebench"},
    "ares_exp/TwentyQuestions-v0": {"preset": "twenty_questions"},
    "ares_exp/Preset-v0": {},
}
"""Environment ids and their arguments of `PresetGym`."""


ENTRY_POINT = "ares_exp.wrappers.preset_gym:PresetGym"


def register() -> None:
    """Registers the ids of this package with Gymnasium; may be called more than once."""
    for one, arguments in IDS.items():
        if one not in gymnasium.registry:
            gymnasium.register(one, entry_point=ENTRY_POINT, nondeterministic=True, kwargs=arguments)


register()
