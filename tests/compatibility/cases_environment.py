"""Sections 1.10 to 1.12, 1.16 and 1.17: the environment, commands, health checks, skills, unsupported features."""

from tests.compatibility.case import INVALID, PASSES, Case, Containers, Directory, Episode, Reading

IMAGE = "[environment]\ndocker_image = 'debian:bookworm-slim'\n"
COUNTS = "echo x >> /tries; [ $(wc -l < /tries) -ge 3 ]"
SHOWS_TRIES = "#!/bin/bash\nwc -l < /tries\necho 1 > /logs/verifier/reward.txt\n"
WITH_TOOL = r"""FROM debian:bookworm-slim
RUN mkdir -p /opt/tool/bin && printf '#!/bin/sh\necho the tool\n' >/opt/tool/bin/tool && chmod +x /opt/tool/bin/tool
ENV PATH=/opt/tool/bin:$PATH
"""
SHOWS_TOOL = "#!/bin/bash\ntool\necho 1 > /logs/verifier/reward.txt\n"
SKILL = "---\nname: Count\ndescription: How to count.\n---\n"


def healthcheck(command: str, **fields: float) -> str:
    lines = [f"{name} = {value}" for name, value in fields.items()]
    return "\n".join(("[environment.healthcheck]", f"command = '''{command}'''", *lines, ""))


CASES: list[Case] = [
    # 1.10 environment definition
    Containers(
        id="1.10 an image and a Dockerfile",
        says="With docker_image the Dockerfile is not used: the image wins.",
        files={"task.toml": "[environment]\ndocker_image = 'an/image'\n"},
        expected={"agent.docker_image": "an/image"},
    ),
    Episode(
        id="1.10 the image wins",
        says="With docker_image the Dockerfile is not even built.",
        files={"task.toml": IMAGE, "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN exit 1\n"},
        container="docker",
        expected={"reward": 1},
    ),
    Episode(
        id="1.10 files beside an image",
        says="Files in environment/ beside an image are uploaded into its working directory.",
        files={
            "task.toml": IMAGE + "workdir = '/opt'\n",
            "environment/Dockerfile": None,
            "environment/data/x": "here",
            "tests/test.sh": "#!/bin/bash\ncat /opt/data/x\necho 1 > /logs/verifier/reward.txt\n",
        },
        container="docker",
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "here"}},
    ),
    Containers(
        id="1.10 a compose file",
        says="environment/docker-compose.yaml is the task's compose file; other spellings are not.",
        files={"environment/docker-compose.yaml": "services: {}\n", "environment/compose.yaml": "x"},
        expected={"agent.compose_file": "docker-compose.yaml"},
    ),
    Containers(
        id="1.10 another compose file",
        says="environment/docker-compose.yml is not recognised.",
        files={"environment/docker-compose.yml": "services: {}\n"},
        expected={"agent.compose_file": None},
    ),
    Episode(
        id="1.10 compose without an engine for it",
        says="A backend without compose cannot run a task that has a compose file.",
        files={"environment/docker-compose.yaml": "services: {main: {}}\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["docker-compose.yaml", "a-task"]},
    ),
    Episode(
        id="1.10 no definition",
        says="Neither image nor Dockerfile nor compose file: an error that aborts the job when the trial is made.",
        deviation="The task is refused by name before anything starts; the others can be run.",
        files={"environment/Dockerfile": None, "environment/data": "x"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["Dockerfile"]},
        reference={"error": "FileNotFoundError", "started": False},
    ),
    Containers(
        id="1.10 resources",
        says="cpus, memory and storage are limits of the container; build_timeout_sec bounds its whole start.",
        files={
            "task.toml": "[environment]\ncpus = 2\nmemory_mb = 512\nstorage_mb = 1024\ngpus = 1\n"
            "build_timeout_sec = 60\nworkdir = '/srv'\n"
        },
        expected={
            "agent.cpus": 2,
            "agent.memory_mb": 512,
            "agent.storage_mb": 1024,
            "agent.gpus": 1,
            "agent.start_timeout_sec": 60.0,
            "agent.workdir": "/srv",
        },
    ),
    Episode(
        id="1.10 a start that takes too long",
        says="build_timeout_sec bounds the start: EnvironmentStartTimeoutError.",
        files={
            "task.toml": "[environment]\nbuild_timeout_sec = 0.5\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN sleep 60\n",
        },
        expected={"error": "EnvironmentStartTimeoutError"},
        reference={"error": "EnvironmentStartTimeoutError", "rewards": None},
    ),
    Episode(
        id="1.10 a start that fails",
        says="A Dockerfile that does not build is an error of the trial.",
        files={"environment/Dockerfile": "FROM debian:bookworm-slim\nRUN exit 7\n"},
        expected={"error": "ContainerStartError"},
    ),
    # 1.11 commands
    Episode(
        id="1.11 the working directory",
        says="[environment].workdir goes before the image's WORKDIR.",
        files={
            "task.toml": "[environment]\nworkdir = '/srv'\n",
            "tests/test.sh": "#!/bin/bash\npwd\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent=["pwd > /logs/artifacts/agent"],
        expected={"files": {"verifier/test-stdout.txt": "/srv", "artifacts/logs/artifacts/agent": "/srv"}},
    ),
    Episode(
        id="1.11 a missing working directory",
        says="workdir is not created: every command fails, which shows as a missing reward.",
        deviation="It is said before the agent starts.",
        files={"task.toml": "[environment]\nworkdir = '/not/there'\n"},
        expected={"error": "ContainerStartError", "message": ["/not/there"]},
    ),
    Episode(
        id="1.11 users of the image",
        says="Without a phase's user it is the image's.",
        needs_root=True,
        files={
            "environment/Dockerfile": "FROM debian:bookworm-slim\nUSER nobody\n",
            "tests/test.sh": "#!/bin/bash\nid -un\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent=["id -un > /logs/artifacts/agent"],
        expected={"files": {"verifier/test-stdout.txt": "nobody", "artifacts/logs/artifacts/agent": "nobody"}},
    ),
    Episode(
        id="1.11 no standard input",
        says="Commands have no input to wait for.",
        agent=["cat; echo $? > /logs/artifacts/code"],
        expected={"reward": 1, "files": {"artifacts/logs/artifacts/code": "0"}},
    ),
    *(
        Episode(
            id=f"1.11 the image's PATH, {container}, {who}",
            says="ENV PATH of the image holds for the agent, for the solution and for the tests.",
            files={
                "environment/Dockerfile": WITH_TOOL,
                "solution/solve.sh": "#!/bin/bash\ntool > /logs/artifacts/agent\n",
                "tests/test.sh": SHOWS_TOOL,
            },
            agent="oracle" if who == "oracle" else ["tool > /logs/artifacts/agent"],
            container=container,
            expected={
                "reward": 1,
                "files": {"verifier/test-stdout.txt": "the tool", "artifacts/logs/artifacts/agent": "the tool"},
            },
        )
        for container in ("local", "docker")
        for who in ("agent", "oracle")
    ),
    *(
        Episode(
            id=f"1.11 variables of the image, {container}",
            says="Variables of the image hold for every command, unless those of the task have the same name.",
            files={
                "task.toml": "[environment.env]\nBOTH = 'the task'\nPATH = '/opt/task:/usr/bin:/bin'\n",
                "environment/Dockerfile": "FROM debian:bookworm-slim\n"
                'ENV OWN="a  b" BOTH=image PATH=/opt/image:$PATH\n',
                "tests/test.sh": '#!/bin/bash\necho "$OWN, $BOTH, $PATH"\necho 1 > /logs/verifier/reward.txt\n',
            },
            agent=['echo "$OWN, $BOTH, $PATH" > /logs/artifacts/agent'],
            container=container,
            expected={
                "files": {
                    "verifier/test-stdout.txt": "a  b, the task, /opt/task:/usr/bin:/bin",
                    "artifacts/logs/artifacts/agent": "a  b, the task, /opt/task:/usr/bin:/bin",
                }
            },
        )
        for container in ("local", "docker")
    ),
    *(
        Episode(
            id=f"1.11 SHELL of the image, {container}",
            says="SHELL is for the lines of the Dockerfile: commands are read by bash -c, which is no login shell.",
            files={
                "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN echo 'export READ=profile' > ~/.profile\n"
                'SHELL ["/bin/bash", "-lc"]\nRUN echo "$READ" > /built\n'
            },
            agent=['(cat /built; echo "$READ"; shopt -q login_shell || echo $- | grep -o c) > /logs/artifacts/agent'],
            container=container,
            expected={"reward": 1, "files": {"artifacts/logs/artifacts/agent": "profile\n\nc"}},
        )
        for container in ("local", "docker")
    ),
    Episode(
        id="1.11 BASH_ENV of the image",
        says="bash reads the file of BASH_ENV for each command, as it is then.",
        files={"environment/Dockerfile": "FROM debian:bookworm-slim\nENV BASH_ENV=/bash_env\n"},
        agent=["echo SEEN=set > /bash_env", "echo $SEEN > /logs/artifacts/agent"],
        expected={"reward": 1, "files": {"artifacts/logs/artifacts/agent": "set"}},
    ),
    # 1.12 health checks
    Episode(
        id="1.12 healthy in the end",
        says="A check that succeeds within its retries lets the agent start, at once.",
        files={"task.toml": healthcheck(COUNTS, interval_sec=0.01, retries=3), "tests/test.sh": SHOWS_TRIES},
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "3"}},
    ),
    Episode(
        id="1.12 never healthy",
        says="When the count of failures reaches retries: HealthcheckError.",
        files={"task.toml": healthcheck(COUNTS, interval_sec=0.01, retries=2)},
        expected={"error": "HealthcheckError", "message": ["failed 2 times"]},
        reference={"error": "HealthcheckError", "rewards": None},
    ),
    Episode(
        id="1.12 no retries",
        says="retries = 0 still runs the check once, and fails on the first failure.",
        files={"task.toml": healthcheck("exit 9", interval_sec=0.01, retries=0)},
        expected={"error": "HealthcheckError", "message": ["failed 1 times", "exit code 9"]},
        reference={"error": "HealthcheckError", "rewards": None},
    ),
    Episode(
        id="1.12 failures at the start",
        says="Failures inside the start period are not counted; start_interval_sec is waited then.",
        files={
            "task.toml": healthcheck(COUNTS, interval_sec=60, start_period_sec=60, start_interval_sec=0.01, retries=1),
            "tests/test.sh": SHOWS_TRIES,
        },
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "3"}},
    ),
    Episode(
        id="1.12 a check that takes too long",
        says="A command that exceeds its timeout is no failed attempt: it ends the trial at once.",
        deviation="It does; the error is a HealthcheckError here, a plain RuntimeError there.",
        files={"task.toml": healthcheck("sleep 60", timeout_sec=1, retries=5)},
        expected={"error": "HealthcheckError", "message": ["limit of 1 s"]},
        reference={"error": "RuntimeError", "rewards": None},
    ),
    Episode(
        id="1.12 a check without a limit",
        says="The timeout is cut to whole seconds; less than one is no limit.",
        files={"task.toml": healthcheck("sleep 0.6", timeout_sec=0.1)},
        expected={"reward": 1},
    ),
    Episode(
        id="1.12 the user of the check",
        says="The check runs as the image's user, not as the agent's, and before the agent.",
        needs_root=True,
        files={
            "task.toml": "[agent]\nuser = 'nobody'\n" + healthcheck("id -un > /who"),
            "tests/test.sh": "#!/bin/bash\ncat /who\necho 1 > /logs/verifier/reward.txt\n",
        },
        expected={"files": {"verifier/test-stdout.txt": "root"}},
    ),
    Episode(
        id="1.12 the check of a verifier's environment",
        says="[verifier.environment.healthcheck] is never run.",
        files={"task.toml": "[verifier.environment.healthcheck]\ncommand = 'exit 1'\nretries = 1\n"},
        expected={"reward": 1},
    ),
    # 1.16 skills and tool servers
    Episode(
        id="1.16 skills",
        says="skills_dir is a directory in the container whose skills the agent can find.",
        files={
            "task.toml": "[environment]\nskills_dir = '/skills'\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nCOPY skills /skills\n",
            "environment/skills/counting/SKILL.md": SKILL,
        },
        expected={"reward": 1, "asked": ["Count", "How to count.", "/skills/counting/SKILL.md"]},
    ),
    Episode(
        id="1.16 tool servers for an agent that has no use for them",
        says="An agent that cannot use tool servers fails before the start.",
        files={"task.toml": "[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://a'\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["mcp_servers"]},
        reference={"error": "ValueError", "rewards": None},
    ),
    Episode(
        id="1.16 tool servers for the oracle",
        says="The oracle ignores the skills and tool servers of a task.",
        files={
            "task.toml": "[environment]\nskills_dir = '/x'\n[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://a'\n",
            "solution/solve.sh": PASSES,
        },
        agent="oracle",
        expected={"reward": 1},
    ),
    Reading(
        id="1.16 tool servers",
        says="Transports need what they are reached by; http means streamable-http; headers are for HTTP.",
        examples={
            f"[[environment.mcp_servers]]\nname = 'a'\n{keys}": {f"environment.mcp_servers.0.{field}": value}
            if field
            else INVALID
            for keys, field, value in (
                ("url = 'http://a'", "transport", "sse"),
                ("transport = 'http'\nurl = 'http://a'", "transport", "streamable-http"),
                ("transport = 'stdio'\ncommand = 'a'", "command", "a"),
                ("transport = 'stdio'\nurl = 'http://a'", "", ""),
                ("transport = 'sse'\ncommand = 'a'", "", ""),
                ("transport = 'tcp'\nurl = 'http://a'", "", ""),
                ("transport = 'stdio'\ncommand = 'a'\nheaders = {A = 'b'}", "", ""),
                ("url = 'http://a'\nheaders = {X-Y = 'a ${B:-c}'}", "headers", {"X-Y": "a ${B:-c}"}),
                ("url = 'http://a'\nheaders = {'X Y' = 'a'}", "", ""),
                ('url = "http://a"\nheaders = {X = "a\\nb"}', "", ""),
            )
        },
    ),
    Reading(
        id="1.16 credentials in headers",
        says="A header that looks like a credential has references only, after a scheme word perhaps.",
        examples={
            f"[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://a'\nheaders = {{{name} = '{value}'}}": {
                "environment.mcp_servers.0.name": "a"
            }
            if is_valid
            else INVALID
            for name, value, is_valid in (
                ("Authorization", "Bearer ${KEY}", True),
                ("X-Api-Key", "${KEY}", True),
                ("X-Api-Key", "${A}${B}", True),
                ("X-Tokens", "literal", True),
                ("X-Api-Key", "literal", False),
                ("X-Api-Key", "${KEY:-literal}", False),
                ("Cookie", "a=b", False),
                ("Authorization", "Bearer literal", False),
                ("Authorization", "Basic ${USER_ID}:${SECRET}", True),
                ("X-Api-Key", "${KEY:-}", True),
                ("X-Other", "${API_KEY:-literal}", False),
            )
        },
    ),
    # 1.17 Windows, TPUs
    Directory(
        id="1.17 a windows task",
        says="A windows task with test.bat is a task.",
        files={"task.toml": "[environment]\nos = 'windows'\n", "tests/test.bat": ""},
    ),
    Episode(
        id="1.17 windows is refused",
        says="A windows task runs where the engine has Windows containers; elsewhere it aborts the job.",
        deviation="Refused by name, before anything starts.",
        files={"task.toml": "[environment]\nos = 'windows'\n", "tests/test.bat": ""},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["a-task", "windows"]},
        reference={"error": "RuntimeError", "started": False},
    ),
    Episode(
        id="1.6 TPUs are refused",
        says="A TPU that the backend does not have aborts the job when the trial is made.",
        deviation="Refused by name, before anything starts.",
        files={"task.toml": "[environment]\ntpu = {type = 'v5', topology = '2x4'}\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["a-task", "TPU"]},
        reference={"error": "RuntimeError", "started": False},
    ),
    Episode(
        id="1.10 GPUs are refused where there are none",
        says="A backend without GPUs rejects a task that needs one.",
        files={"task.toml": "[environment]\ngpus = 1\n"},
        expected={"error": "UnsupportedTaskError", "started": False, "message": ["GPU"]},
        reference={"error": "RuntimeError", "started": False},
    ),
]
