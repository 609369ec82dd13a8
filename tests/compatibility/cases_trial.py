"""Sections 2.1 to 2.5, 2.7, and the prior context: the life of a trial."""

from tests.compatibility.case import PASSES, Case, Directory, Episode, Limits

CONVERSATION = """{"schema_version": "ATIF-v1.8", "agent": {"name": "other", "version": "1"}, "steps": [
 {"step_id": 1, "source": "system", "message": "You are somebody else."},
 {"step_id": 2, "source": "user", "message": "What is the colour?"},
 {"step_id": 3, "source": "agent", "message": "It is turquoise."}]}"""
SEES_SLEEP = (
    "#!/bin/bash\nif grep -q sleep /proc/$(cat /alive)/cmdline; then echo 1; else echo 0; fi"
    " > /logs/verifier/reward.txt\n"
)
LISTS_TESTS = "#!/bin/bash\nls /tests | paste -sd' '\necho 0 > /logs/verifier/reward.txt\n"
DONE_HERE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LIMITED = "[agent]\ntimeout_sec = 1\n"

CASES: list[Case] = [
    # 2.1 layout
    Episode(
        id="2.1 log directories",
        says="/logs/agent, /logs/verifier and /logs/artifacts are there at the start, root's, mode 777.",
        needs_root=True,
        files={"task.toml": "[agent]\nuser = 'nobody'\n"},
        agent=["stat -c '%U %a %n' /logs/agent /logs/verifier /logs/artifacts > /logs/artifacts/seen"],
        expected={
            "files": {
                "artifacts/logs/artifacts/seen": "root 777 /logs/agent\n"
                "root 777 /logs/verifier\nroot 777 /logs/artifacts"
            }
        },
    ),
    Episode(
        id="2.1 /logs/agent on the host",
        says="/logs/agent is downloaded to agent/ of the trial.",
        deviation="Agents live on the host here and are recorded there; files are kept by naming them as artifacts.",
        agent=["echo x > /logs/agent/x"],
        expected={"reward": 1, "files": {"agent/x": None}},
        reference={"files": {"agent/x": "x"}},
    ),
    Episode(
        id="2.2 /logs/agent for the verifier",
        says="What is in /logs/agent is there when the verifier runs in the same container.",
        files={"tests/test.sh": "#!/bin/bash\ncat /logs/agent/x\necho 1 > /logs/verifier/reward.txt\n"},
        agent=["echo x > /logs/agent/x"],
        expected={"files": {"verifier/test-stdout.txt": "x"}},
    ),
    Episode(
        id="2.1 no solution for others",
        says="/solution is there for the oracle only.",
        files={"solution/solve.sh": PASSES},
        agent=["ls / | grep -c solution > /logs/artifacts/seen"],
        expected={"files": {"artifacts/logs/artifacts/seen": "0"}},
    ),
    # 2.3 what ends the agent phase
    Episode(
        id="2.3 an agent that did nothing",
        says="An agent that returns is verified, also when its commands failed.",
        agent=["exit 3"],
        expected={"reward": 1, "error": None},
    ),
    Episode(
        id="2.3 an agent whose time is up",
        says="It is verified all the same; both the time limit and the reward are kept.",
        files={"task.toml": LIMITED},
        agent=["sleep 60"],
        expected={"reward": 1, "truncated_by": "time"},
        reference={"error": "AgentTimeoutError", "rewards": {"reward": 1.0}},
    ),
    Episode(
        id="2.3 an agent that raises",
        says="Any other exception of the agent: no verification.",
        agent=["true"],
        raises=True,
        expected={"error": "AgentError", "files": {"verifier/reward.txt": None}},
        reference={"error": "RuntimeError", "rewards": None},
    ),
    Episode(
        id="2.3 artifacts of an agent that raises",
        says="Its logs and artifacts are still recovered.",
        agent=["echo x > /logs/artifacts/x"],
        raises=True,
        expected={"error": "AgentError", "files": {"artifacts/logs/artifacts/x": "x"}},
        reference={"files": {"artifacts/logs/artifacts/x": "x"}},
    ),
    # 2.4 what the agent left where the verifier works
    Episode(
        id="2.4 what the agent left in /tests",
        says="/tests of a task without steps is not emptied before the tests are uploaded.",
        deviation="It is, as in steps: pytest would read a conftest.py that the agent left beside the tests.",
        files={"tests/test.sh": LISTS_TESTS},
        agent=["mkdir /tests; touch /tests/conftest.py"],
        expected={"reward": 0, "files": {"verifier/test-stdout.txt": "test.sh"}},
        reference={"rewards": {"reward": 0.0}, "files": {"verifier/test-stdout.txt": "conftest.py test.sh"}},
    ),
    Episode(
        id="2.4 what the image has in /tests",
        says="In a task without steps, what the image has in /tests is there beside the tests.",
        files={
            "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir /app /tests && echo yes > /tests/data\n"
            "WORKDIR /app\n",
            "tests/test.sh": LISTS_TESTS,
        },
        expected={"reward": 0, "files": {"verifier/test-stdout.txt": "data test.sh"}},
        reference={"rewards": {"reward": 0.0}, "files": {"verifier/test-stdout.txt": "data test.sh"}},
    ),
    Episode(
        id="2.4 what the agent left in /logs/verifier",
        says="Only old rewards are removed from /logs/verifier of a task without steps.",
        deviation="It is emptied before the collect hooks: what is in the way of the tests' output, or too much to be "
        "copied, would make an error of a reward of 0.",
        files={
            "task.toml": "[[verifier.collect]]\ncommand = 'echo hook > /logs/verifier/hook'\n",
            "tests/test.sh": LISTS_TESTS,
        },
        agent=["echo x > /logs/verifier/x; mkdir /logs/verifier/test-stdout.txt"],
        expected={"reward": 0, "files": {"verifier/x": None, "verifier/hook": "hook"}},
        reference={"error": "RewardFileNotFoundError", "rewards": None, "files": {"verifier/x": "x"}},
    ),
    Episode(
        id="2.4 a file in the place of a directory",
        says="Without a directory for its output, or one for the tests, nothing can be verified.",
        deviation="What the agent has put in their place is replaced: it could make an error of a reward of 0.",
        files={"tests/test.sh": LISTS_TESTS},
        agent=["rm -rf /logs; touch /logs /tests"],
        expected={"reward": 0, "error": None},
        reference={"error": "AddTestsDirError", "rewards": None},
    ),
    Episode(
        id="1.11 a working directory that is gone",
        says="Without the working directory no command runs, and there is no reward.",
        deviation="It is made anew, empty, before the tests are run: an agent could make an error of a reward of 0.",
        files={"tests/test.sh": LISTS_TESTS},
        agent=[f"cd /; rm -rf /app; {DONE_HERE}"],
        expected={"reward": 0, "error": None},
        reference=None,
    ),
    Episode(
        id="1.11 a file in the place of the working directory",
        says="Without the working directory no command runs, and there is no reward.",
        deviation="It is made anew, empty, before the tests are run: an agent could make an error of a reward of 0.",
        files={"tests/test.sh": LISTS_TESTS},
        agent=[f"cd /; rm -rf /app; touch /app; {DONE_HERE}"],
        expected={"reward": 0, "error": None},
        reference=None,
    ),
    Episode(
        id="2.3 what the agent left running",
        says="A process that a command of the agent left behind lives on: a server that the tests talk to, say.",
        files={"tests/test.sh": SEES_SLEEP},
        agent=["sleep 300 & echo $! > /alive"],
        expected={"reward": 1},
    ),
    Episode(
        id="2.3 what runs when the time is up",
        says="The agent's command is not killed on a timeout.",
        deviation="It is, with all it started: what it writes later would change what is scored.",
        files={"task.toml": LIMITED, "tests/test.sh": SEES_SLEEP},
        agent=["echo $$ > /alive; exec sleep 300"],
        expected={"reward": 0, "truncated_by": "time"},
        reference={"rewards": {"reward": 1.0}},
    ),
    Episode(
        id="2.5 a verifier that takes too long",
        says="VerifierTimeoutError, without a reward.",
        files={"task.toml": "[verifier]\ntimeout_sec = 1\n", "tests/test.sh": "#!/bin/bash\nsleep 60\n"},
        expected={"error": "VerifierTimeoutError"},
        reference={"error": "VerifierTimeoutError", "rewards": None},
    ),
    Episode(
        id="2.3 a verifier's error after the agent's time limit",
        says="The first exception wins: the time limit is recorded, without a reward.",
        deviation="The verifier's error is recorded: the time limit would be an ordinary ending.",
        files={"task.toml": LIMITED, "tests/test.sh": "#!/bin/bash\n"},
        agent=["sleep 60"],
        expected={"error": "RewardFileNotFoundError"},
        reference={"error": "AgentTimeoutError", "rewards": None},
    ),
    # 2.5 time limits
    Limits(
        id="2.5 no agent limit",
        says="Without a limit of the task or the run the agent has none; the verifier has 600 s, the start 600 s.",
        expected={"agent": None, "verifier": 600.0, "start": 600.0},
    ),
    Limits(
        id="2.5 limits of the task",
        says="The task's own limits.",
        toml=LIMITED + "[verifier]\ntimeout_sec = 2\n[environment]\nbuild_timeout_sec = 3\n",
        expected={"agent": 1.0, "verifier": 2.0, "start": 3.0},
    ),
    Limits(
        id="2.5 limits of the run",
        says="The run's limit replaces the task's; a 0 is ignored.",
        toml=LIMITED,
        limits={"agent_timeout_sec": 5, "verifier_timeout_sec": 0},
        expected={"agent": 5.0, "verifier": 600.0},
    ),
    Limits(
        id="2.5 limits that are multiplied",
        says="timeout_multiplier goes for every phase that has no multiplier of its own.",
        toml=LIMITED,
        limits={"timeout_multiplier": 2, "verifier_timeout_multiplier": 3},
        expected={"agent": 2.0, "verifier": 1800.0, "start": 1200.0},
    ),
    Limits(
        id="2.5 limits that are capped",
        says="The cap comes before the multiplier: 50 times 2 is 100.",
        toml="[agent]\ntimeout_sec = 80\n",
        limits={"agent_timeout_max_sec": 50, "timeout_multiplier": 2, "verifier_timeout_max_sec": 70},
        expected={"agent": 100.0, "verifier": 140.0},
    ),
    Limits(
        id="2.5 a cap on no limit",
        says="A cap bounds an unlimited agent; inf is unlimited.",
        toml="[verifier]\ntimeout_sec = inf\n",
        limits={"agent_timeout_max_sec": 50},
        expected={"agent": 50.0, "verifier": None},
    ),
    Limits(
        id="2.5 the limit of an image",
        says="The start has a multiplier of its own.",
        limits={"environment_build_timeout_multiplier": 0.5, "timeout_multiplier": 9},
        expected={"start": 300.0},
    ),
    Episode(
        id="1.6 a zero limit",
        says="[agent].timeout_sec = 0 is over at once; the verifier still runs.",
        files={"task.toml": "[agent]\ntimeout_sec = 0\n"},
        agent=["sleep 60"],
        expected={"reward": 1, "truncated_by": "time"},
    ),
    # 2.7 oracle and nop
    Episode(
        id="2.7 doing nothing",
        says="An agent that does nothing gets the baseline reward.",
        files={"tests/test.sh": "#!/bin/bash\n[ -e /answer ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"},
        expected={"reward": 0},
    ),
    Episode(
        id="2.7 the oracle",
        says="It runs /solution/solve.sh, made executable, as the agent's user in the default directory.",
        needs_root=True,
        files={
            "task.toml": "[agent]\nuser = 'nobody'\n",
            "solution/solve.sh": "#!/bin/bash\necho $(id -un) $(pwd) $0 > /logs/artifacts/seen\n",
        },
        agent="oracle",
        expected={"reward": 1, "files": {"artifacts/logs/artifacts/seen": "nobody /app /solution/solve.sh"}},
    ),
    Episode(
        id="2.7 an oracle that fails",
        says="A non-zero exit is no error: output and code are in /logs/agent, and the verifier runs.",
        files={
            "solution/solve.sh": "#!/bin/bash\necho out; echo err >&2; exit 4\n",
            "tests/test.sh": "#!/bin/bash\ncat /logs/agent/oracle.txt /logs/agent/exit-code.txt\n"
            "echo 1 > /logs/verifier/reward.txt\n",
        },
        agent="oracle",
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "out\nerr\n4"}},
    ),
    Episode(
        id="2.7 no solution",
        says="Without solve.sh the oracle fails: an error of the trial, which is not verified.",
        deviation="It is found before anything starts.",
        agent="oracle",
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["solve.sh"]},
        reference={"error": "FileNotFoundError", "rewards": None},
    ),
    Episode(
        id="1.3 a solution that is left out",
        says="A .harborignore that leaves out solve.sh is an error of the oracle.",
        files={"solution/solve.sh": PASSES, "solution/.harborignore": "solve.sh\n"},
        agent="oracle",
        expected={"error": "UnsupportedTaskError", "started": False, "message": [".harborignore"]},
        reference={"error": "ValueError", "rewards": None},
    ),
    Episode(
        id="2.7 an oracle whose time is up",
        says="The agent's time limit goes for the oracle, too.",
        files={"task.toml": LIMITED, "solution/solve.sh": "#!/bin/bash\nsleep 60\n"},
        agent="oracle",
        expected={"reward": 1, "truncated_by": "time"},
    ),
    # 1.1 prior context
    Episode(
        id="1.1 a prior context",
        says="trajectory.json is a conversation that the agent goes on with.",
        files={"trajectory.json": CONVERSATION},
        expected={"reward": 1, "asked": ["What is the colour?", "It is turquoise.", "Do it."]},
    ),
    Episode(
        id="1.1 a prior context of steps",
        says="Of a multi-step task it is the first step's directory that counts.",
        files={
            "task.toml": "[[steps]]\nname = 'a'\n",
            "steps/a/instruction.md": "Do a.",
            "steps/a/trajectory.json": CONVERSATION,
            "trajectory.json": "[",
        },
        expected={"reward": 1, "asked": ["It is turquoise.", "Do a."]},
    ),
    Episode(
        id="2.2 a broken prior context",
        says="An invalid trajectory.json fails before the environment starts.",
        files={"trajectory.json": '{"steps": []}'},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["trajectory.json"]},
        reference={"error": "ValueError", "rewards": None},
    ),
    Episode(
        id="2.7 a prior context and the oracle",
        says="The oracle ignores trajectory.json.",
        files={"trajectory.json": "[", "solution/solve.sh": PASSES},
        agent="oracle",
        expected={"reward": 1},
    ),
    Directory(
        id="2.2 a broken prior context loads", says="It is no matter of validity.", files={"trajectory.json": "["}
    ),
]
