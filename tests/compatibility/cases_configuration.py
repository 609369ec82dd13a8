"""Sections 1.5 to 1.9: task.toml, legacy spellings, network policies, variables."""

from tests.compatibility.case import INVALID, Case, Containers, Episode, Reading

ENV = "environment"
INTERFACES = "tail -n+3 /proc/net/dev | cut -d: -f1"
PUBLIC, NOTHING = ["public", []], ["no-network", []]
GRADES_ENV = '#!/bin/bash\necho "$LAYER|$TASK|$SOLUTION"\necho 1 > /logs/verifier/reward.txt\n'


def network(table: str, keys: str) -> str:
    return f"[{table}]\n{keys}"


CASES: list[Case] = [
    # 1.5 general parsing
    Reading(
        id="1.5 any schema version",
        says="schema_version is compared with nothing; it has to be a string.",
        examples={
            "": {"schema_version": "1.4"},
            "schema_version = '99'": {"schema_version": "99"},
            "schema_version = 1.4": INVALID,
        },
    ),
    Reading(
        id="1.5 no range checks",
        says="Negative and zero numbers are accepted; inf is a time limit.",
        examples={
            "[agent]\ntimeout_sec = 0": {"agent.timeout_sec": 0.0},
            "[verifier]\ntimeout_sec = inf": {"verifier.timeout_sec": float("inf")},
            "[environment]\ncpus = 0\nmemory_mb = -1": {"environment.cpus": 0, "environment.memory_mb": -1},
        },
    ),
    Reading(
        id="1.5 not a number",
        says="There are no range checks: nan and negative numbers are accepted as time limits.",
        deviation="They are errors: an agent with such a limit cannot do anything.",
        examples={"[agent]\ntimeout_sec = nan": INVALID, "[agent]\ntimeout_sec = -1": INVALID},
        reference={"[agent]\ntimeout_sec = nan": {}, "[agent]\ntimeout_sec = -1": {"agent.timeout_sec": -1.0}},
    ),
    Reading(
        id="1.5 lax numbers, strict strings",
        says="Numeric strings, true and integral floats are accepted for numbers; numbers are not for strings.",
        examples={
            "[agent]\ntimeout_sec = '5'": {"agent.timeout_sec": 5.0},
            "[environment]\ncpus = '2'\nmemory_mb = 512.0": {"environment.cpus": 2, "environment.memory_mb": 512},
            "[environment]\ngpus = true": {"environment.gpus": 1},
            "[environment]\nworkdir = 5": INVALID,
            "[environment]\nmemory_mb = 1.5": INVALID,
        },
    ),
    Reading(
        id="1.5 env tables hold strings",
        says="All env tables are string to string.",
        examples={
            f"[{table}]\nA = {value}": INVALID
            for table in ("environment.env", "verifier.env", "solution.env")
            for value in ("1", "true")
        },
    ),
    Episode(
        id="1.5 unknown keys",
        says="Unknown keys at any level are ignored silently.",
        deviation="They are ignored, and the user is told: most are typing errors.",
        files={"task.toml": "colour = 'red'\n[agent]\nenv = {A = 'b'}\n"},
        expected={"reward": 1, "warnings": ["unknown key colour", "unknown key agent.env"]},
        reference={"error": None, "rewards": {"reward": 1.0}},
    ),
    # 1.6 every field
    Reading(
        id="1.6 root fields",
        says="Defaults and types of the root; steps = [] is a single step.",
        examples={
            "": {"source": None, "multi_step_reward_strategy": None},
            "steps = []": {"steps": []},
            "source = 'x'\nmulti_step_reward_strategy = 'final'\n[metadata]\na = {b = [1]}": {
                "source": "x",
                "multi_step_reward_strategy": "final",
                "metadata": {"a": {"b": [1]}},
            },
            "multi_step_reward_strategy = 'sum'": INVALID,
            "artifacts = ['/a', {source = '/b', destination = 'c'}]": {
                "artifacts.1.source": "/b",
                "artifacts.1.destination": "c",
            },
        },
    ),
    Reading(
        id="1.6 package identity",
        says="[task].name is organisation/name of safe characters; a version is not empty.",
        examples={
            "[task]\nname = 'org/name'": {"task.name": "org/name", "task.version": None, "task.description": ""},
            "[task]\nname = '1.a_b-c/x.Y'\nversion = '2'": {"task.version": "2"},
            "[task]\nname = 'bare'": INVALID,
            "[task]\nname = 'a/b/c'": INVALID,
            "[task]\nname = 'a/b..c'": INVALID,
            "[task]\nname = '-a/b'": INVALID,
            "[task]\nname = 'a/b'\nversion = ''": INVALID,
            "[task]\ndescription = 'no name'": INVALID,
            "[task]\nname = 'a/b'\nauthors = [{name = 'A'}]\nkeywords = ['k']": {"task.authors.0.email": None},
            "[task]\nname = 'a/b'\nauthors = [{email = 'a@b'}]": INVALID,
        },
    ),
    Reading(
        id="1.6 agent fields",
        says="No agent time limit unless one is given; users are names or numbers.",
        examples={
            "": {"agent.timeout_sec": None, "agent.user": None, "agent.network_mode": None},
            "[agent]\nuser = 'nobody'": {"agent.user": "nobody"},
            "[agent]\nuser = 1000": {"agent.user": 1000},
            "[agent]\nuser = '1000:1000'": {"agent.user": "1000:1000"},
        },
    ),
    Reading(
        id="1.6 verifier fields",
        says="The verifier has 600 s by default; collect hooks need a command.",
        examples={
            "": {"verifier.timeout_sec": 600.0, "verifier.environment": None, "verifier.environment_mode": None},
            "[[verifier.collect]]\ncommand = 'x'": {
                "verifier.collect.0.service": "main",
                "verifier.collect.0.timeout_sec": 60.0,
                "verifier.collect.0.user": None,
            },
            "[[verifier.collect]]\nservice = 'main'": INVALID,
            "[verifier]\nenvironment_mode = 'apart'": INVALID,
            "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]": INVALID,
        },
    ),
    Reading(
        id="1.6 environment fields",
        says="Defaults of [environment]; its system is linux or windows in any case; cpus are finite.",
        examples={
            "": {
                "environment.build_timeout_sec": 600.0,
                "environment.os": "linux",
                "environment.cpus": None,
                "environment.memory_mb": None,
                "environment.storage_mb": None,
                "environment.gpus": None,
                "environment.workdir": None,
                "environment.healthcheck": None,
                "environment.skills_dir": None,
            },
            "[environment]\nos = 'LiNuX'": {"environment.os": "linux"},
            "[environment]\nos = 'Windows'": {"environment.os": "windows"},
            "[environment]\nos = 'macos'": INVALID,
            "[environment]\ncpus = 2.0": {"environment.cpus": 2},
            "[environment]\ncpus = 0.5": {"environment.cpus": 0.5},
            "[environment]\ncpus = inf": INVALID,
            "[environment]\ncpus = nan": INVALID,
            "[environment.healthcheck]\ninterval_sec = 1": INVALID,
        },
    ),
    Reading(
        id="1.6 TPUs",
        says="A topology is two or more positive integers joined by x.",
        examples={
            "[environment]\ntpu = {type = 'v5', topology = '2x4'}": {"environment.tpu.topology": "2x4"},
            **{
                f"[environment]\ntpu = {{type = '{kind}', topology = '{topology}'}}": INVALID
                for kind, topology in (("v5", "8"), ("v5", "0x4"), ("v5", "02x4"), ("v5", "2x"), ("", "2x4"))
            },
        },
    ),
    # 1.7 legacy spellings
    Reading(
        id="1.7 sizes as text",
        says="memory and storage are numbers with K, M or G, cut to whole megabytes.",
        examples={
            **{
                f"[environment]\nmemory = '{size}'\nstorage = '{size}'": {
                    "environment.memory_mb": megabytes,
                    "environment.storage_mb": megabytes,
                }
                for size, megabytes in (
                    ("2G", 2048),
                    ("2g", 2048),
                    (" 2G ", 2048),
                    ("1.5G", 1536),
                    ("512M", 512),
                    ("512.9M", 512),
                    ("1048576K", 1024),
                )
            },
            **{f"[environment]\nmemory = '{size}'": INVALID for size in ("2GB", "2Gi", "2048", "", "G")},
        },
    ),
    Reading(
        id="1.7 sizes as numbers",
        says="memory = 2048, a number, is dropped.",
        examples={"[environment]\nmemory = 2048": {"environment.memory_mb": None}},
    ),
    Episode(
        id="1.7 sizes as numbers are warned about",
        says="memory = 2048, a number, is dropped without a word.",
        deviation="It is dropped, and the user is told: the limit that was meant is not in force.",
        files={"task.toml": "[environment]\nmemory = 2048\n"},
        expected={"reward": 1, "warnings": ["memory = 2048"]},
        reference={"error": None, "rewards": {"reward": 1.0}},
    ),
    Reading(
        id="1.7 old and new size",
        says="An old key that contradicts the new one, as it is written, is an error.",
        examples={
            "[environment]\nmemory = '2G'\nmemory_mb = 2048": {"environment.memory_mb": 2048},
            "[environment]\nmemory = '2G'\nmemory_mb = 4096": INVALID,
            "[environment]\nmemory = '4G'\nmemory_mb = '4096'": INVALID,
        },
    ),
    Reading(
        id="1.7 allow_internet",
        says="allow_internet is the old network_mode, which wins; beside an empty allowed_hosts it does nothing.",
        examples={
            f"[{table}]\n{keys}": {f"{table}.network": policy} if policy else INVALID
            for table in ("environment", "verifier.environment")
            for keys, policy in (
                ("allow_internet = false", NOTHING),
                ("allow_internet = true", PUBLIC),
                ("allow_internet = true\nnetwork_mode = 'no-network'", NOTHING),
                ("allow_internet = false\nnetwork_mode = 'public'", PUBLIC),
                ("allow_internet = false\nallowed_hosts = []", PUBLIC),
                ("allow_internet = false\nallowed_hosts = ['a.org']", None),
            )
        },
    ),
    Episode(
        id="1.7 allow_internet does nothing",
        says="allow_internet = false beside allowed_hosts = [] is ignored without a word.",
        deviation="It is ignored, and the user is told: the network is open where a task meant to shut it.",
        files={"task.toml": "[environment]\nallow_internet = false\nallowed_hosts = []\n"},
        expected={"reward": 1, "warnings": ["allow_internet = false has no effect"]},
        reference={"error": None, "rewards": {"reward": 1.0}},
    ),
    Reading(
        id="1.7 version",
        says="version is the old schema_version, which wins where both are there.",
        examples={
            "version = '1.0'": {"schema_version": "1.0"},
            "version = '1.0'\nschema_version = '1.3'": {"schema_version": "1.3"},
        },
    ),
    # 1.8 network policies
    Reading(
        id="1.8 modes and hosts",
        says="Hosts need network_mode = allowlist, which may have none; a phase's hosts always need a mode.",
        examples={
            network(ENV, "network_mode = 'allowlist'"): {"environment.network": ["allowlist", []]},
            network(ENV, "network_mode = 'allowlist'\nallowed_hosts = ['a.org']"): {
                "environment.network": ["allowlist", ["a.org"]]
            },
            network(ENV, "allowed_hosts = []"): {"environment.network": PUBLIC},
            network(ENV, "allowed_hosts = ['a.org']"): INVALID,
            network(ENV, "network_mode = 'no-network'\nallowed_hosts = ['a.org']"): INVALID,
            network(ENV, "network_mode = 'Public'"): INVALID,
            network("agent", "allowed_hosts = []"): INVALID,
            network("verifier", "allowed_hosts = []"): INVALID,
            network("agent", "network_mode = 'public'\nallowed_hosts = ['a.org']"): INVALID,
        },
    ),
    Reading(
        id="1.8 hosts",
        says="Names, wildcards, addresses and networks, in a canonical form; no URLs, ports or paths.",
        examples={
            network(ENV, f"network_mode = 'allowlist'\nallowed_hosts = ['{host}']"): {
                "environment.network": ["allowlist", [canonical]]
            }
            if canonical
            else INVALID
            for host, canonical in (
                (" Example.ORG.. ", "example.org"),
                ("localhost", "localhost"),
                ("*.a-b.org", "*.a-b.org"),
                ("10.0.0.1", "10.0.0.1"),
                ("10.0.0.0/8", "10.0.0.0/8"),
                ("2001:DB8:0:0::1", "2001:db8::1"),
                ("https://a.org", ""),
                ("a.org:443", ""),
                ("a.org/x", ""),
                ("[::1]", ""),
                ("fe80::1%eth0", ""),
                ("*", ""),
                ("a.*.org", ""),
                ("*.10.0.0.1", ""),
                ("a_b.org", ""),
                ("", ""),
                ("10.0.0.1/8", ""),
                ("-a.org", ""),
            )
        },
    ),
    Containers(
        id="1.8 networks of phases",
        says="Each phase has its own policy, else that of the environment, which holds between phases.",
        files={
            "task.toml": "[environment]\nnetwork_mode = 'no-network'\n"
            "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org']\n[verifier]\nnetwork_mode = 'public'"
        },
        expected={"networks": [[NOTHING, ["allowlist", ["a.org"]], PUBLIC]]},
    ),
    Containers(
        id="1.8 networks of steps",
        says="A step's policy goes before the task's, and that before the environment's.",
        files={
            "task.toml": "[agent]\nnetwork_mode = 'no-network'\n[[steps]]\nname = 'a'\n"
            "[[steps]]\nname = 'b'\nagent = {network_mode = 'public'}\nverifier = {network_mode = 'no-network'}",
            "steps/a/instruction.md": "x",
            "steps/b/instruction.md": "x",
        },
        expected={"networks": [[PUBLIC, NOTHING, PUBLIC], [PUBLIC, PUBLIC, NOTHING]]},
    ),
    Containers(
        id="1.8 network of a separate verifier",
        says="A separate verifier has its own table's policy (public by default), or a copy of the environment's.",
        files={
            "task.toml": "[environment]\nnetwork_mode = 'no-network'\n[[steps]]\nname = 'a'\n"
            "verifier = {environment_mode = 'separate'}\n[[steps]]\nname = 'b'\nverifier = {environment = {}}",
            "steps/a/instruction.md": "x",
            "steps/b/instruction.md": "x",
        },
        expected={"networks": [[NOTHING, NOTHING, NOTHING], [NOTHING, NOTHING, PUBLIC]]},
    ),
    Episode(
        id="1.8 no network",
        says="A backend enforces the mode: without a network there is only the loopback.",
        files={
            "task.toml": "[environment]\nnetwork_mode = 'no-network'\n",
            "tests/test.sh": "#!/bin/bash\n" + INTERFACES + "\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent=[f"{INTERFACES} > /logs/artifacts/agent"],
        network="public",
        expected={"files": {"artifacts/logs/artifacts/agent": "lo", "verifier/test-stdout.txt": "lo"}},
    ),
    Episode(
        id="1.8 a network that cannot be switched",
        says="A backend that cannot switch the policy between phases rejects the task before the start.",
        files={"task.toml": "[agent]\nnetwork_mode = 'no-network'\n"},
        network="public",
        expected={"error": "UnsupportedTaskError", "started": False},
        reference={"error": "ValueError", "started": False},
    ),
    # 1.9 variables
    Reading(
        id="1.9 templates",
        says="Only a value that is a template as a whole is one; a variable that is set counts even when it is empty.",
        text="template",
        examples={
            "${A}": "va",
            "${E}": "",
            "${E:-d}": "",
            "${M:-}": "",
            "${M:-d}": "d",
            "${M:-a:b}": "a:b",
            "${M:-a}b}": "a}b",
            "${M:-a\nb}": "${M:-a\nb}",
            **{text: text for text in ("x${A}", "${A}${A}", "$A", "$${A}", "${}", "${A:+x}", "")},
            "${M}": INVALID,
            "${ A }": INVALID,
            "${A-d}": INVALID,
        },
    ),
    Episode(
        id="1.9 a variable of the environment is missing",
        says="A missing variable in [environment.env] aborts the whole job when the trial is made.",
        deviation="The tasks that lack one are refused by name before anything starts; the others can be run.",
        files={"task.toml": "[environment.env]\nA = '${ARES_EXP_MISSING}'\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["ARES_EXP_MISSING", "a-task"]},
        reference={"error": "ValueError", "started": False},
    ),
    Episode(
        id="1.9 a variable of the verifier is missing",
        says="A missing variable in [verifier.env] is an error of the trial, after the tests were uploaded.",
        deviation="It is found before anything starts: no episode is run that cannot be verified.",
        files={"task.toml": "[verifier.env]\nA = '${ARES_EXP_MISSING}'\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["[verifier.env]", "ARES_EXP_MISSING"]},
        reference={"error": "ValueError", "rewards": None},
    ),
    Episode(
        id="1.9 a variable of the solution is missing",
        says="A missing variable in [solution.env] counts only for the oracle.",
        files={"task.toml": "[solution.env]\nA = '${ARES_EXP_MISSING}'\n"},
        expected={"reward": 1},
    ),
    Episode(
        id="1.9 variables of the test script",
        says="[verifier.env] goes before [environment.env]; the solution's are not visible to the verifier.",
        files={
            "task.toml": "[environment.env]\nLAYER = 'environment'\nTASK = '${ARES_EXP_HOST}'\n"
            "[verifier.env]\nLAYER = 'verifier'\n[solution.env]\nSOLUTION = 'seen'\n",
            "tests/test.sh": GRADES_ENV,
            "solution/solve.sh": '#!/bin/bash\necho "$LAYER|$TASK|$SOLUTION|$DEBIAN_FRONTEND" > /logs/artifacts/seen\n',
        },
        agent="oracle",
        host={"ARES_EXP_HOST": "host"},
        expected={
            "files": {
                "verifier/test-stdout.txt": "verifier|host|",
                "artifacts/logs/artifacts/seen": "environment|host|seen|noninteractive",
            }
        },
    ),
    Episode(
        id="1.9 variables of an image",
        says="[environment.env] goes before the variables of the image.",
        files={
            "task.toml": "[environment.env]\nA = 'task'\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nENV A=image B=image\n",
            "tests/test.sh": '#!/bin/bash\necho "$A $B"\necho 1 > /logs/verifier/reward.txt\n',
        },
        expected={"files": {"verifier/test-stdout.txt": "task image"}},
    ),
    Episode(
        id="1.9 variables of the first process",
        says="[environment.env] reaches the container's first process, a literal $ and all.",
        files={
            "task.toml": "[environment.env]\nARES = 'a $HOME $$ ${X} b'\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\n"
            'ENTRYPOINT ["sh", "-c", "echo \\"$ARES\\" > /first; exec \\"$@\\"", "-"]\n',
            "tests/test.sh": "#!/bin/bash\ncat /first\necho 1 > /logs/verifier/reward.txt\n",
        },
        container="docker",
        expected={"files": {"verifier/test-stdout.txt": "a $HOME $$ ${X} b"}},
    ),
]
