"""Sections 1.15 and 2.6: tasks of several steps."""

from tests.compatibility.case import DONE, INVALID, PASSES, Case, Containers, Directory, Episode, Limits, Reading

A, B = "[[steps]]\nname = 'a'\n", "[[steps]]\nname = 'b'\n"
STEPS = {
    "task.toml": A + B,
    "instruction.md": None,
    "steps/a/instruction.md": "Do a.\n",
    "steps/b/instruction.md": "Do b.\n",
}


def scores(reward: str) -> str:
    return f"#!/bin/bash\necho '{reward}' > /logs/verifier/reward.json\n"


def steps(toml: str = A + B, **tests: str) -> dict[str, str | None]:
    """Two steps, a and b; the rewards that their own tests write, by step."""
    own = {f"steps/{name}/tests/test.sh": scores(reward) for name, reward in tests.items()}
    return {**STEPS, "task.toml": toml, **own}


CASES: list[Case] = [
    # 1.15 fields, files, inheritance
    Reading(
        id="1.15 names of steps",
        says="A portable directory name, unique after normalisation and case folding.",
        examples={
            **{f"[[steps]]\nname = '{name}'": {"steps.0.name": name} for name in ("a", "two words", "schön", ".x")},
            **{
                f"[[steps]]\nname = '{name}'": INVALID
                for name in ("", " ", ".", "..", "a.", "a ", "a/b", "a:b", "a?", "a\\b", "CON", "nul.txt", "x" * 256)
            },
            "[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'": INVALID,
            "[[steps]]\nname = 'ö'\n[[steps]]\nname = 'o\u0308'": INVALID,
            "[[steps]]\nmin_reward = 1": INVALID,
        },
    ),
    Reading(
        id="1.15 fields of steps",
        says="min_reward is a number or a table of numbers; health check and artifacts are as elsewhere.",
        examples={
            A + "min_reward = 0.5": {"steps.0.min_reward": 0.5},
            A + "min_reward = {a = 1}": {"steps.0.min_reward": {"a": 1.0}},
            A + "min_reward = 'all'": INVALID,
            A + "healthcheck = {command = 'x'}\nartifacts = ['/a']": {
                "steps.0.healthcheck.retries": 3,
                "steps.0.verifier.timeout_sec": 600.0,
            },
        },
    ),
    Directory(
        id="1.15 tests of steps",
        says="A step has its own test script, or uses tests/test.sh; the root's instruction is not needed.",
        files={**STEPS, "tests/test.sh": None, "steps/a/tests/test.sh": PASSES, "steps/b/tests/test.sh": PASSES},
    ),
    Directory(
        id="1.15 a step without tests",
        says="Neither: no valid task.",
        files={**STEPS, "tests/test.sh": None, "steps/a/tests/test.sh": PASSES},
        scan=False,
    ),
    Limits(
        id="1.15 time limits of steps",
        says="A step inherits the agent's time limit of the task, not the verifier's.",
        toml="[agent]\ntimeout_sec = 10\n[verifier]\ntimeout_sec = 20\n" + A,
        expected={"agent": 10.0, "verifier": 600.0},
    ),
    Containers(
        id="1.15 users of steps",
        says="Users of agent and verifier: the step's, else the task's.",
        files={
            **STEPS,
            "task.toml": "[agent]\nuser = 'one'\n[verifier]\nuser = 'two'\n" + A + "agent = {user = 'three'}\n" + B,
        },
        expected={"agent.users": ["one", "three", "two"]},
    ),
    Episode(
        id="1.15 variables of steps",
        says="A step's verifier.env goes over the task's.",
        files={
            **STEPS,
            "task.toml": "[verifier.env]\nA = 'task'\nB = 'task'\n" + A + "verifier = {env = {B = 'step'}}\n" + B,
            "tests/test.sh": '#!/bin/bash\necho "$A $B"\necho 1 > /logs/verifier/reward.txt\n',
        },
        agent=[DONE],
        expected={
            "files": {"steps/a/verifier/test-stdout.txt": "task step", "steps/b/verifier/test-stdout.txt": "task task"}
        },
    ),
    # 2.6 the order of things
    Episode(
        id="2.6 one container for all steps",
        says="Steps are run in order in the same container, an agent run and a verification each.",
        files={**STEPS, "tests/test.sh": "#!/bin/bash\ncat /log | paste -sd' '\necho 1 > /logs/verifier/reward.txt\n"},
        agent=["echo one >> /log", DONE, "echo two >> /log"],
        expected={
            "steps": {"a": 1, "b": 1},
            "files": {"steps/a/verifier/test-stdout.txt": "one", "steps/b/verifier/test-stdout.txt": "one two"},
        },
    ),
    Episode(
        id="2.6 each step has its instruction",
        says="A step's agent is told that step's instruction.",
        files=steps(),
        agent=[DONE],
        expected={"asked": ["Do a."], "steps": {"a": 1, "b": 1}},
    ),
    Episode(
        id="2.6 directories are emptied between steps",
        says="/logs/agent is emptied before a step; after shared verification /logs/verifier and /tests, too.",
        files={**STEPS, "steps/a/tests/of-a": "x"},
        agent=[
            "echo x > /logs/agent/x; echo x > /logs/verifier/x",
            DONE,
            "ls /logs/agent /logs/verifier /tests | grep -v : | paste -sd' ' > /logs/artifacts/seen",
        ],
        expected={"steps": {"a": 1, "b": 1}, "files": {"steps/b/artifacts/logs/artifacts/seen": ""}},
    ),
    Episode(
        id="2.4 tests of a step over shared tests",
        says="In a step /tests is emptied first; then tests/, and the step's own over it.",
        files={
            **STEPS,
            "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir /tests && touch /tests/of-image\n",
            "tests/shared": "task\n",
            "tests/both": "task\n",
            "tests/test.sh": "#!/bin/bash\ncd /tests; cat both shared | paste -sd' '; ls | paste -sd' '\n"
            "echo 1 > /logs/verifier/reward.txt\n",
            "steps/b/tests/both": "step\n",
        },
        agent=[DONE],
        expected={
            "files": {
                "steps/a/verifier/test-stdout.txt": "task task\nboth shared test.sh",
                "steps/b/verifier/test-stdout.txt": "step task\nboth shared test.sh",
            }
        },
        reference={"rewards": {"reward": 1.0}},
    ),
    Episode(
        id="2.6 the working directory of a step",
        says="workdir/ is uploaded to the current directory, and its setup.sh run as the step's agent user.",
        needs_root=True,
        files={
            **steps(A + "agent = {user = 'nobody'}\n" + B),
            "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir -m 777 /app\nWORKDIR /app\n",
            "steps/a/workdir/data": "d\n",
            "steps/a/workdir/setup.sh": "echo $(pwd) $(id -un) $(cat data) > /app/log\n",
        },
        agent=["cp log /logs/artifacts", DONE],
        expected={"steps": {"a": 1, "b": 1}, "files": {"steps/a/artifacts/logs/artifacts/log": "/app nobody d"}},
    ),
    Episode(
        id="2.3 a setup.sh that fails",
        says="A setup.sh that fails is an error of the step: agent and verifier are skipped, the trial stops.",
        deviation="The episode ends in that error; Harbor keeps it on the step, and a mean over the steps before.",
        files={**steps(), "steps/b/workdir/setup.sh": "echo why >&2; exit 5\n"},
        agent=[DONE],
        expected={"error": "StepSetupError", "message": ["exit code 5", "why"], "steps": {"a": 1}},
        reference={"steps": {"a": {"reward": 1.0}, "b": None}},
    ),
    Episode(
        id="2.6 the health check of a step",
        says="It runs after setup.sh, as the step's agent user, besides the environment's.",
        needs_root=True,
        files={
            **steps(
                "[environment.healthcheck]\ncommand = 'echo first > /tmp/log; chmod 666 /tmp/log'\n"
                + A
                + "agent = {user = 'nobody'}\nhealthcheck = {command = 'id -un >> /tmp/log'}\n"
                + B
            ),
            "steps/a/workdir/setup.sh": "echo setup >> /tmp/log\n",
        },
        agent=["cp /tmp/log /logs/artifacts/log", DONE],
        expected={"files": {"steps/a/artifacts/logs/artifacts/log": "first\nsetup\nnobody"}},
    ),
    Episode(
        id="2.3 a step that is not healthy",
        says="A step's health check that fails is an error of the step; the trial stops.",
        deviation="The episode ends in that error; Harbor keeps it on the step.",
        files=steps(A + "healthcheck = {command = 'exit 1', retries = 1}\n" + B),
        agent=[DONE],
        expected={"error": "HealthcheckError", "steps": {}},
        reference={"steps": {"a": None}},
    ),
    Episode(
        id="2.6 artifacts of a step",
        says="Each step collects the task's artifacts, then its own; kept under steps/<name>/.",
        files=steps("artifacts = ['/shared']\n" + A + "artifacts = ['/own']\n" + B),
        agent=["echo 1 > /shared; echo 1 > /own; echo 1 > /logs/artifacts/x", DONE, "echo 2 > /shared"],
        expected={
            "files": {
                "steps/a/artifacts/shared": "1",
                "steps/a/artifacts/own": "1",
                "steps/b/artifacts/shared": "2",
                "steps/b/artifacts/own": None,
            }
        },
    ),
    Episode(
        id="2.6 a separate verifier in the middle",
        says="A separate verifier of a step that is not the last leaves the agent's container running.",
        files={
            **steps(A + "verifier = {environment_mode = 'separate'}\n" + B),
            "tests/test.sh": "#!/bin/bash\nls /kept\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent=["touch /kept", DONE],
        expected={"steps": {"a": 1, "b": 1}, "files": {"steps/b/verifier/test-stdout.txt": "/kept"}},
    ),
    # 2.6 rewards
    Episode(
        id="2.6 the mean of steps",
        says="By default the mean of the steps, key by key; a missing key counts as 0.",
        files=steps(a='{"reward": 1, "x": 1}', b='{"reward": 0.5}'),
        agent=[DONE],
        expected={"rewards": {"reward": 0.75, "x": 0.5}, "reward": 0.75, "steps": {"a": 1, "b": 0.5}},
        reference={"rewards": {"reward": 0.75, "x": 0.5}, "steps": {"a": {"reward": 1, "x": 1}, "b": {"reward": 0.5}}},
    ),
    Episode(
        id="2.6 the last step's reward",
        says="multi_step_reward_strategy = final: the result of the last step that was run.",
        files=steps("multi_step_reward_strategy = 'final'\n" + A + B, a='{"reward": 1, "x": 1}', b='{"reward": 0.5}'),
        agent=[DONE],
        expected={"rewards": {"reward": 0.5}},
    ),
    Episode(
        id="1.6 a strategy without steps",
        says="multi_step_reward_strategy is ignored for a single step.",
        files={"task.toml": "multi_step_reward_strategy = 'final'\n"},
        expected={"reward": 1},
    ),
    Episode(
        id="2.6 min_reward is met",
        says="Equality passes.",
        files=steps(A + "min_reward = 0.5\n" + B, a='{"reward": 0.5}'),
        agent=[DONE],
        expected={"steps": {"a": 0.5, "b": 1}},
    ),
    Episode(
        id="2.6 min_reward is not met",
        says="The trial stops after the step; steps that were not reached do not count in the mean.",
        files=steps(A + "min_reward = 0.6\n" + B, a='{"reward": 0.5}'),
        agent=[DONE],
        expected={"steps": {"a": 0.5}, "rewards": {"reward": 0.5}},
    ),
    Episode(
        id="2.6 min_reward of a key",
        says="A table compares each key; a missing one is not met.",
        files=steps(A + "min_reward = {reward = 0, other = -1}\n" + B, a='{"reward": 1}'),
        agent=[DONE],
        expected={"steps": {"a": 1}},
    ),
    Episode(
        id="2.6 min_reward of no reward key",
        says="A number is compared with the key reward, and with no other.",
        files=steps(A + "min_reward = 0\n" + B, a='{"score": 1}'),
        agent=[DONE],
        expected={"steps": {"a": 1}},
        reference={"steps": {"a": {"score": 1}}},
    ),
    Episode(
        id="2.6 final after a stop",
        says="final is the last step that was run.",
        files=steps("multi_step_reward_strategy = 'final'\n" + A + "min_reward = 1\n" + B, a='{"reward": 0.5}'),
        agent=[DONE],
        expected={"rewards": {"reward": 0.5}},
    ),
    Episode(
        id="2.3 a time limit of a step",
        says="The step's agent is cut short; the step is verified, and the next one run.",
        files=steps(A + "agent = {timeout_sec = 1}\n" + B),
        agent=["sleep 60", DONE],
        expected={"steps": {"a": 1, "b": 1}, "rewards": {"reward": 1}, "truncated_by": None},
    ),
    Episode(
        id="2.6 a verifier of a step that fails",
        says="A verifier's error is recorded on the step; the trial stops, and the mean is over the others.",
        deviation="The episode ends in that error: a mean over what could be verified would hide it.",
        files={**steps(), "steps/b/tests/test.sh": "#!/bin/bash\n"},
        agent=[DONE],
        expected={"error": "RewardFileNotFoundError", "steps": {"a": 1}},
        reference={"error": None, "steps": {"a": {"reward": 1.0}, "b": None}, "rewards": {"reward": 1.0}},
    ),
    Episode(
        id="2.3 an agent of a step that fails",
        says="An agent's error is recorded on the step, which is verified; the next one is run.",
        deviation="An agent's error ends the episode, as it does in a task of a single step.",
        files=steps(),
        agent=["true"],
        raises=True,
        expected={"error": "AgentError", "steps": {}},
        reference={"error": None, "steps": {"a": {"reward": 1.0}, "b": {"reward": 1.0}}},
    ),
    Episode(
        id="2.7 the oracle in steps",
        says="A step's own solution/, else the task's; /solution is not emptied in between.",
        files={
            **steps(),
            "solution/solve.sh": "#!/bin/bash\nls /solution | paste -sd' ' > /logs/artifacts/b\n",
            "steps/a/solution/solve.sh": "#!/bin/bash\necho own > /logs/artifacts/a\n",
            "steps/a/solution/of-a": "x",
        },
        agent="oracle",
        expected={
            "steps": {"a": 1, "b": 1},
            "files": {
                "steps/a/artifacts/logs/artifacts/a": "own",
                "steps/b/artifacts/logs/artifacts/b": "of-a solve.sh",
            },
        },
    ),
    Episode(
        id="2.7 a step's solution without a script",
        says="steps/<name>/solution/ without solve.sh does not fall back: an error of the step, which is verified.",
        deviation="It is found before anything starts.",
        files={**steps(), "solution/solve.sh": PASSES, "steps/a/solution/notes": "x"},
        agent="oracle",
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["steps/a/solution/solve.sh"]},
        reference={"error": None, "steps": {"a": {"reward": 1.0}, "b": {"reward": 1.0}}},
    ),
]
