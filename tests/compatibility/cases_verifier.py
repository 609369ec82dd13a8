"""Sections 1.13 and 1.14: where the verifier works, artifacts, collect hooks."""

from tests.compatibility.case import INVALID, PASSES, Case, Containers, Episode, Reading

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"
BRINGS_TESTS = "FROM debian:bookworm-slim\nCOPY test.sh /tests/test.sh\nRUN touch /of-the-verifier\n"
LOOKS = (
    "#!/bin/bash\ncd / && ls -d answer of-the-verifier app/made logs/agent logs/artifacts tests/data 2>/dev/null"
    " | paste -sd' '\necho 1 > /logs/verifier/reward.txt\n"
)
TWO = "[[steps]]\nname = 'a'\n{}\n[[steps]]\nname = 'b'\n{}\n"
TWO_FILES = {"steps/a/instruction.md": "x", "steps/b/instruction.md": "x"}


def artifact(keys: str) -> str:
    return f"artifacts = [{{{keys}}}]\n"


CASES: list[Case] = [
    # 1.13 modes
    Containers(
        id="1.13 shared by default",
        says="Without a word the tests run in the agent's container.",
        expected={"verifier": [False]},
    ),
    Containers(
        id="1.13 separate by a table",
        says="[verifier.environment], even empty, means separate.",
        files={"task.toml": "[verifier.environment]\n"},
        expected={"verifier": [True], "verifier.docker_image": None, "verifier.context_dir": "environment"},
    ),
    Containers(
        id="1.13 modes of steps",
        says="A step's mode: its own word, its own table, else the task's mode.",
        files={
            "task.toml": SEPARATE
            + TWO.format("verifier = {environment_mode = 'shared'}", "")
            + "[[steps]]\nname = 'c'\nverifier = {environment = {cpus = 2}}\n",
            **TWO_FILES,
            "steps/c/instruction.md": "x",
        },
        expected={"verifier": [False, True, True]},
    ),
    Containers(
        id="1.13 a step's table in a shared task",
        says="A step's own table makes that step separate.",
        files={"task.toml": TWO.format("", "verifier = {environment = {}}"), **TWO_FILES},
        expected={"verifier": [False, True]},
    ),
    Containers(
        id="1.13 the step's image first",
        says="1: the image of the step's table. Resources are those of that table.",
        files={
            "task.toml": "[verifier.environment]\ndocker_image = 'of/task'\ncpus = 4\n[[steps]]\nname = 'a'\n"
            "verifier = {environment = {docker_image = 'of/step', cpus = 2}}\n",
            "steps/a/instruction.md": "x",
            "steps/a/tests/Dockerfile": "FROM a\n",
        },
        expected={"verifier.docker_image": "of/step", "verifier.cpus": 2, "verifier.context_dir": None},
    ),
    Containers(
        id="1.13 the step's tests next",
        says="2: steps/<name>/tests/ with a Dockerfile; resources are still those of the task's table.",
        files={
            "task.toml": "[verifier.environment]\ndocker_image = 'of/task'\ncpus = 4\n[[steps]]\nname = 'a'\n",
            "steps/a/instruction.md": "x",
            "steps/a/tests/Dockerfile": "FROM a\n",
        },
        expected={"verifier.docker_image": None, "verifier.cpus": 4, "verifier.context_dir": "steps/a/tests"},
    ),
    Containers(
        id="1.13 the task's image next",
        says="3: the image of the task's table, before tests/Dockerfile.",
        files={"task.toml": "[verifier.environment]\ndocker_image = 'of/task'\n", "tests/Dockerfile": "FROM a\n"},
        expected={"verifier.docker_image": "of/task", "verifier.context_dir": None},
    ),
    Containers(
        id="1.13 the task's tests next",
        says="4: tests/ with a Dockerfile, whatever image the agent has.",
        files={"task.toml": SEPARATE + "[environment]\ndocker_image = 'of/agent'\n", "tests/Dockerfile": "FROM a\n"},
        expected={"verifier.docker_image": None, "verifier.context_dir": "tests"},
    ),
    Containers(
        id="1.13 the agent's environment last",
        says="5: environment/ and the agent's image; resources are a copy of [environment], or the verifier's own.",
        files={"task.toml": SEPARATE + "[environment]\ndocker_image = 'of/agent'\ncpus = 3\nenv = {A = 'b'}\n"},
        expected={
            "verifier.docker_image": "of/agent",
            "verifier.context_dir": "environment",
            "verifier.cpus": 3,
            "verifier.env": {"A": "b"},
        },
    ),
    Containers(
        id="1.13 the start of a verifier",
        says="Its start is bounded by the agent's build_timeout_sec, not by that of its own table.",
        files={"task.toml": "[environment]\nbuild_timeout_sec = 50\n[verifier.environment]\nbuild_timeout_sec = 70\n"},
        expected={"verifier.start_timeout_sec": 50.0},
    ),
    Episode(
        id="1.13 a separate verifier like the agent's container",
        says="It starts from the image, not from what the agent left; tests are uploaded.",
        files={"task.toml": SEPARATE, "tests/test.sh": LOOKS, "tests/data": "x"},
        agent=["touch /answer /app/made"],
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "logs/artifacts tests/data"}},
    ),
    Episode(
        id="1.13 a separate verifier with tests/Dockerfile",
        says="Its image owns /tests: nothing is uploaded to it, and nothing from environment/.",
        files={"task.toml": SEPARATE, "tests/test.sh": LOOKS, "tests/data": "x", "tests/Dockerfile": BRINGS_TESTS},
        agent=["touch /answer"],
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "logs/artifacts of-the-verifier"}},
    ),
    Episode(
        id="1.13 variables of a separate verifier",
        says="It has the variables of its own table, not those of [environment], and [verifier.env].",
        files={
            "task.toml": "[environment.env]\nA = 'agent'\n[verifier.env]\nB = 'script'\n"
            "[verifier.environment.env]\nC = 'verifier'\n",
            "tests/test.sh": '#!/bin/bash\necho "[$A] [$B] [$C]"\necho 1 > /logs/verifier/reward.txt\n',
        },
        expected={"files": {"verifier/test-stdout.txt": "[] [script] [verifier]"}},
    ),
    Episode(
        id="1.13 artifacts in a separate verifier",
        says="It gets /logs/artifacts and every artifact, where they were; nothing else.",
        files={
            "task.toml": "artifacts = ['/out', {source = '/app/report', destination = 'elsewhere'}]\n" + SEPARATE,
            "tests/test.sh": "#!/bin/bash\ncat /out/x /logs/artifacts/y /app/report; ls /app; stat -c %a /out\n"
            "echo 1 > /logs/verifier/reward.txt\n",
        },
        agent=["mkdir /out; echo x > /out/x; echo y > /logs/artifacts/y; echo r > /app/report; touch /app/other"],
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "x\ny\nr\nreport\n777"}},
    ),
    # 1.14 artifacts
    Reading(
        id="1.14 artifact entries",
        says="A source without '..'; a destination that stays in artifacts/ and is not the manifest.",
        examples={
            **{
                artifact(f"source = '/a', destination = '{place}'"): {"artifacts.0.destination": place}
                for place in ("b", "b/c", "x/manifest.json")
            },
            artifact("source = '/a', destination = ''"): {"artifacts.0.destination": None},
            **{
                artifact(f"source = '/a', destination = '{place}'"): INVALID
                for place in ("/b", "../b", "a/../b", "a\\b", ".", "manifest.json", "manifest.json/")
            },
            artifact("source = '/a/../b'"): INVALID,
            artifact("destination = 'a'"): INVALID,
            artifact("source = 'relative'"): {"artifacts.0.source": "relative"},
            artifact("source = 'relative', service = 'db'"): INVALID,
            artifact("source = '/a', service = '-db'"): INVALID,
            artifact("source = '/a', service = 'a.b-c_1'"): {"artifacts.0.service": "a.b-c_1"},
        },
    ),
    Episode(
        id="1.14 where artifacts go",
        says="/logs/artifacts first; then each entry, to its path or its destination; all in manifest.json.",
        files={"task.toml": "artifacts = ['/out', {source = '/app/r.txt', destination = 'report/final.txt'}]\n"},
        agent=["mkdir /out; echo x > /out/x; echo y > /logs/artifacts/y; echo r > /app/r.txt"],
        expected={
            "files": {"artifacts/logs/artifacts/y": "y", "artifacts/out/x": "x", "artifacts/report/final.txt": "r"},
            "manifest": [
                ("/logs/artifacts", "artifacts/logs/artifacts", "directory", "ok"),
                ("/out", "artifacts/out", "directory", "ok"),
                ("/app/r.txt", "artifacts/report/final.txt", "file", "ok"),
            ],
        },
    ),
    Episode(
        id="1.14 artifacts that are missing",
        says="A missing artifact is recorded as failed, which is no error; an empty /logs/artifacts as ok.",
        deviation="An empty /logs/artifacts is said to be empty, as Harbor does only where it is mounted.",
        files={"task.toml": "artifacts = ['/not/there', '/nor.this']\n"},
        expected={
            "reward": 1,
            "manifest": [
                ("/logs/artifacts", "artifacts/logs/artifacts", "directory", "empty"),
                ("/not/there", "artifacts/not/there", "file", "failed"),
                ("/nor.this", "artifacts/nor.this", "file", "failed"),
            ],
        },
        reference={
            "rewards": {"reward": 1.0},
            "manifest": [
                ("/logs/artifacts", "artifacts/logs/artifacts", "directory", "ok"),
                ("/not/there", "artifacts/not/there", "file", "failed"),
                ("/nor.this", "artifacts/nor.this", "file", "failed"),
            ],
        },
    ),
    Episode(
        id="1.14 artifacts that overlap",
        says="The first claim wins: a later one is skipped, unless it is the same once more.",
        files={
            "task.toml": "artifacts = ['/out', '/out/x', {source = '/app', destination = 'out/app'}, "
            "{source = '/app', destination = 'free'}, {source = '/app', destination = 'free'}]\n"
        },
        agent=["mkdir /out; echo x > /out/x; echo a > /app/a; echo y > /logs/artifacts/y"],
        expected={
            "reward": 1,
            "files": {"artifacts/out/x": "x", "artifacts/free/a": "a", "artifacts/out/app/a": None},
            "manifest": [
                ("/logs/artifacts", "artifacts/logs/artifacts", "directory", "ok"),
                ("/out", "artifacts/out", "directory", "ok"),
                ("/out/x", "artifacts/out/x", "directory", "skipped"),
                ("/app", "artifacts/out/app", "directory", "skipped"),
                ("/app", "artifacts/free", "directory", "ok"),
                ("/app", "artifacts/free", "directory", "ok"),
            ],
        },
    ),
    Episode(
        id="1.14 what artifacts leave out",
        says="exclude has patterns of tar, for directories.",
        files={"task.toml": artifact("source = '/out', exclude = ['*.log', 'cache']")},
        agent=["mkdir -p /out/cache; cd /out; echo 1 > a.log; echo 1 > a.txt; echo 1 > cache/x"],
        expected={
            "reward": 1,
            "files": {"artifacts/out/a.txt": "1", "artifacts/out/a.log": None, "artifacts/out/cache/x": None},
        },
    ),
    Episode(
        id="1.14 artifacts come before the verifier",
        says="They are collected before the tests run: what the tests write is none.",
        files={"tests/test.sh": PASSES + "echo late > /logs/artifacts/late\n"},
        agent=["echo early > /logs/artifacts/early"],
        expected={
            "reward": 1,
            "files": {"artifacts/logs/artifacts/early": "early", "artifacts/logs/artifacts/late": None},
        },
    ),
    Episode(
        id="1.14 files that only root can read",
        says="Artifacts are looked at and fetched as root.",
        needs_root=True,
        files={
            "task.toml": "artifacts = ['/secret']\n[agent]\nuser = 'nobody'\n[environment]\nworkdir = '/'\n"
            "[environment.healthcheck]\ncommand = 'mkdir -m 700 /secret && echo s > /secret/s'\n"
        },
        expected={"files": {"artifacts/secret/s": "s"}},
    ),
    # 1.14 hooks
    Episode(
        id="1.14 collect hooks",
        says="Hooks run after the agent and before its artifacts are fetched, in their order, as their user.",
        needs_root=True,
        files={
            "task.toml": "[[verifier.collect]]\ncommand = 'cat /answer > /logs/artifacts/first'\n"
            "[[verifier.collect]]\ncommand = 'cat /logs/artifacts/first; id -un > /logs/artifacts/second'\n"
            "user = 'nobody'\n"
        },
        agent=["echo 42 > /answer"],
        expected={"files": {"artifacts/logs/artifacts/first": "42", "artifacts/logs/artifacts/second": "nobody"}},
    ),
    Episode(
        id="1.14 a hook that fails",
        says="A hook that fails or takes too long is only a warning.",
        files={
            "task.toml": "[[verifier.collect]]\ncommand = 'exit 1'\n"
            "[[verifier.collect]]\ncommand = 'sleep 60'\ntimeout_sec = 1\n"
            "[[verifier.collect]]\ncommand = 'echo on > /logs/artifacts/on'\n"
        },
        expected={"reward": 1, "files": {"artifacts/logs/artifacts/on": "on"}},
    ),
    Episode(
        id="1.14 hooks of a separate verifier",
        says="Hooks run in the agent's container in both modes.",
        files={
            "task.toml": SEPARATE + "[[verifier.collect]]\ncommand = 'cp /answer /logs/artifacts'\n",
            "tests/test.sh": "#!/bin/bash\ncat /logs/artifacts/answer > /logs/verifier/reward.txt\n",
        },
        agent=["echo 0.5 > /answer"],
        expected={"reward": 0.5},
    ),
    Episode(
        id="1.14 services without a compose file",
        says="Artifacts and hooks of services without a compose file: an error when the trial is made.",
        files={"task.toml": artifact("source = '/a', service = 'db'")},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["db"]},
        reference={"error": "ValueError", "started": False},
    ),
]
