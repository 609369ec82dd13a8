"""Section 2.4: what a verifier may write."""

from tests.compatibility.case import Case, Episode, Reading

EMPTY, UNPARSABLE = "RewardFileEmptyError", "VerifierOutputParseError"


def writes(*commands: str) -> dict[str, str]:
    return {"tests/test.sh": "\n".join(("#!/bin/bash", "cd /logs/verifier", *commands, ""))}


CASES: list[Case] = [
    Reading(
        id="2.4 reward.txt: a number",
        says="One Python float after trimming, always a float, of any size.",
        text="reward.txt",
        examples={
            b"1": {"reward": 1.0},
            b" 0.5 \n": {"reward": 0.5},
            b"-1": {"reward": -1.0},
            b"+1": {"reward": 1.0},
            b".5": {"reward": 0.5},
            b"1e-3": {"reward": 0.001},
            b"1_000": {"reward": 1000.0},
        },
    ),
    Reading(
        id="2.4 reward.txt: no number",
        says="Blank, words, two numbers, no UTF-8: an error of parsing.",
        text="reward.txt",
        examples=dict.fromkeys(
            [b"\n", b"  ", b"true", b"0x1", b"1,0", b"1 2", b"1\n2", b"\xef\xbb\xbf1", b"1\0", b"\xff"], UNPARSABLE
        ),
        reference={b"\xff": "VerifierOutputParseError"},
    ),
    Reading(
        id="2.4 reward.txt: not finite",
        says="nan, inf and what overflows: an error of parsing.",
        text="reward.txt",
        examples=dict.fromkeys([b"nan", b"inf", b"-Infinity", b"1e309"], UNPARSABLE),
    ),
    Reading(
        id="2.4 reward.txt: no bytes",
        says="A file of no bytes has an error of its own.",
        text="reward.txt",
        examples={b"": EMPTY},
    ),
    Reading(
        id="2.4 reward.json: numbers by key",
        says="An object of numbers: ints stay ints, true becomes 1.0, of equal keys the last one counts.",
        text="reward.json",
        examples={
            b'{"reward": 1}': {"reward": 1},
            b'{"reward": 1, "b": 0.5}': {"reward": 1, "b": 0.5},
            b'{"reward": true}': {"reward": 1.0},
            b'{"a": 1, "a": 2}': {"a": 2},
            b' {"reward": -7e3}\n': {"reward": -7000.0},
        },
    ),
    Reading(
        id="2.4 reward.json: other values",
        says="A string, null, a list, an object or no finite number as a value: an error of parsing.",
        text="reward.json",
        examples=dict.fromkeys(
            [b'{"a": %s}' % value for value in (b'"1"', b"null", b"[1]", b"{}", b"NaN", b"Infinity", b"1e309")],
            UNPARSABLE,
        ),
    ),
    Reading(
        id="2.4 reward.json: no object",
        says="A list, a string, null, a BOM, a truncated or blank text: an error of parsing.",
        text="reward.json",
        examples=dict.fromkeys([b"[1]", b'"1"', b"null", b"\xef\xbb\xbf{}", b'{"reward": 1', b" \n"], UNPARSABLE),
    ),
    Reading(
        id="2.4 reward.json: a bare number",
        says="A bare number or boolean is a ValidationError of the data model.",
        deviation="It is an error of parsing as all the others are.",
        text="reward.json",
        examples={b"1": UNPARSABLE, b"true": UNPARSABLE},
        reference={b"1": "ValidationError", b"true": "ValidationError"},
    ),
    Reading(
        id="2.4 reward.json: no keys",
        says="{} is accepted, and counts as no valid reward in reports.",
        deviation="An episode has one reward: without any key it is an error of parsing.",
        text="reward.json",
        examples={b"{}": UNPARSABLE},
        reference={b"{}": {}},
    ),
    Reading(
        id="2.4 reward.json: several keys",
        says="All keys are kept, and none is special.",
        deviation="All are kept, but an episode has one reward: the key `reward`, the only key, or env.reward_key.",
        text="reward.json",
        examples={b'{"a": 1}': {"a": 1}, b'{"a": 1, "b": 0.5}': UNPARSABLE},
        reference={b'{"a": 1, "b": 0.5}': {"a": 1, "b": 0.5}},
    ),
    Reading(
        id="2.4 reward.json: no bytes",
        says="A file of no bytes has an error of its own.",
        text="reward.json",
        examples={b"": EMPTY},
    ),
    Episode(
        id="2.4 several keys and env.reward_key",
        says="All keys are kept.",
        files=writes("""echo '{"a": 1, "b": 0.5}' > reward.json"""),
        options={"reward_key": "b"},
        expected={"reward": 0.5, "rewards": {"a": 1, "b": 0.5}},
        reference={"rewards": {"a": 1, "b": 0.5}},
    ),
    Episode(
        id="2.4 both reward files",
        says="Where reward.json is there, only it is read.",
        files=writes("echo 1 > reward.txt", """echo '{"reward": 0.25}' > reward.json"""),
        expected={"rewards": {"reward": 0.25}},
    ),
    Episode(
        id="2.4 a bad reward.json",
        says="A bad reward.json does not fall back to reward.txt.",
        files=writes("echo 1 > reward.txt", "echo '[]' > reward.json"),
        expected={"error": UNPARSABLE, "started": True},
        reference={"error": UNPARSABLE, "rewards": None},
    ),
    Episode(
        id="2.4 no reward file",
        says="Neither file: an error, whatever the script's exit code.",
        files=writes("exit 0"),
        expected={"error": "RewardFileNotFoundError", "started": True, "message": ["exit code 0"]},
        reference={"error": "RewardFileNotFoundError", "rewards": None},
    ),
    Episode(
        id="2.4 an empty reward file",
        says="An empty file: an error of its own.",
        files=writes(": > reward.txt"),
        expected={"error": EMPTY, "started": True},
        reference={"error": EMPTY, "rewards": None},
    ),
    Episode(
        id="2.4 the exit code is ignored",
        says="The exit code of the test script is ignored.",
        files=writes("echo 0.5 > reward.txt", "exit 3"),
        expected={"reward": 0.5, "rewards": {"reward": 0.5}},
    ),
    Episode(
        id="2.4 rewards that were there before",
        says="Reward files that the agent left are deleted.",
        files=writes("ls | paste -sd' '", "echo 0 > reward.txt"),
        agent=["cd /logs/verifier; echo 1 > reward.txt; echo '{}' > reward.json"],
        expected={"reward": 0, "files": {"verifier/test-stdout.txt": "test-stdout.txt"}},
    ),
    Episode(
        id="2.4 the shebang decides",
        says="The script is made executable and run directly: its shebang decides the interpreter.",
        files={"tests/test.sh": '#!/usr/bin/perl\nopen(F, ">/logs/verifier/reward.txt"); print F "0.75"; print "p";\n'},
        expected={"reward": 0.75, "files": {"verifier/test-stdout.txt": "p"}},
    ),
    Episode(
        id="2.4 output of the tests",
        says="stdout and stderr go to test-stdout.txt; the script runs in the default directory.",
        files=writes("cd - > /dev/null", "pwd", "echo err >&2", "echo 1 > /logs/verifier/reward.txt"),
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "/app\nerr"}},
    ),
    Episode(
        id="2.4 tests that came with the image",
        says="/tests is not emptied first: files of the image stay unless the task has the same.",
        files={
            "environment/Dockerfile": "FROM debian:bookworm-slim\n"
            "RUN mkdir /tests && echo image > /tests/kept && echo image > /tests/replaced\n",
            "tests/replaced": "task\n",
            "tests/test.sh": "#!/bin/bash\ncat /tests/kept /tests/replaced\necho 1 > /logs/verifier/reward.txt\n",
        },
        expected={"files": {"verifier/test-stdout.txt": "image\ntask"}},
    ),
    Episode(
        id="2.4 tests that are not there before",
        says="The agent sees no tests: they are uploaded when it is done.",
        agent=["ls /tests > /logs/artifacts/seen 2>&1; echo $? >> /logs/artifacts/code"],
        expected={"reward": 1, "files": {"artifacts/logs/artifacts/code": "2"}},
    ),
    Episode(
        id="2.4 the user of the tests",
        says="The script runs as the verifier's user, of which the upload and chmod are independent.",
        needs_root=True,
        files={
            "task.toml": "[agent]\nuser = 'nobody'\n[verifier]\nuser = 1234\n",
            "tests/test.sh": "#!/bin/bash\nid -u; stat -c %U /tests/test.sh\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent=["id -un > /logs/artifacts/agent"],
        expected={"files": {"verifier/test-stdout.txt": "1234\nroot", "artifacts/logs/artifacts/agent": "nobody"}},
    ),
    Episode(
        id="2.4 other files of the verifier",
        says="The whole of /logs/verifier is kept.",
        files=writes("mkdir sub", "echo '{}' > sub/ctrf.json", "echo 1 > reward.txt"),
        expected={"files": {"verifier/sub/ctrf.json": "{}", "verifier/reward.txt": "1"}},
    ),
]
