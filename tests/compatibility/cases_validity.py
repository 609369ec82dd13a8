"""Sections 1.1 to 1.4: files, validity, links, .harborignore, instructions."""

from tests.compatibility.case import PASSES, Case, Directory, Episode, Reading

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"
STEP = "[[steps]]\nname = 'a'\n"
LISTS_TESTS = (
    "#!/bin/bash\nfind /tests -mindepth 1 -printf '%P%l\\n' | sort | paste -sd' '\necho 1 > /logs/verifier/reward.txt\n"
)

CASES: list[Case] = [
    # 1.1 files
    Directory(
        id="1.1 an empty task.toml",
        says="An empty task.toml is valid: every key has a default.",
        files={"task.toml": ""},
    ),
    Directory(id="1.1 an empty instruction", says="The instruction may be empty.", files={"instruction.md": ""}),
    Directory(
        id="1.1 other files",
        says="Other files are ignored, metric.py and dataset.toml among them.",
        files={"metric.py": "raise SystemExit", "dataset.toml": "[", "README.md": "x", "notes/x": "y"},
    ),
    # 1.2 validity: a row of the table each
    Directory(
        id="1.2 no task.toml",
        says="A missing task.toml: skipped by the scan, refused by the load.",
        files={"task.toml": None},
        scan=False,
    ),
    Directory(id="1.2 broken TOML", says="A TOML error: skipped, refused.", files={"task.toml": "[agent"}, scan=False),
    Directory(
        id="1.2 a schema error",
        says="A schema error: skipped, refused.",
        files={"task.toml": "[agent]\ntimeout_sec = 'soon'"},
        scan=False,
    ),
    Directory(
        id="1.2 no instruction",
        says="A missing instruction: skipped, refused.",
        files={"instruction.md": None},
        scan=False,
    ),
    Directory(
        id="1.2 no environment",
        says="No environment/ and no docker_image: skipped, but loads.",
        files={"environment/Dockerfile": None},
        scan=False,
        load=True,
    ),
    Directory(
        id="1.2 an empty docker_image",
        says="docker_image = '' counts as unset: skipped without environment/, but loads.",
        files={"environment/Dockerfile": None, "task.toml": "[environment]\ndocker_image = ''"},
        scan=False,
        load=True,
    ),
    Directory(
        id="1.2 an image alone",
        says="With docker_image no environment/ is needed.",
        files={"environment/Dockerfile": None, "task.toml": "[environment]\ndocker_image = 'a'"},
    ),
    Directory(
        id="1.2 an environment without a definition",
        says="environment/ with neither Dockerfile nor compose file: accepted, loads.",
        files={"environment/Dockerfile": None, "environment/data": "x"},
    ),
    Directory(
        id="1.2 only run.sh and test.py",
        says="Only tests/test.sh is an entry script.",
        files={"tests/test.sh": None, "tests/run.sh": PASSES, "tests/test.py": ""},
        scan=False,
    ),
    Directory(
        id="1.2 linux with test.bat",
        says="A linux task with only test.bat: skipped, refused.",
        files={"tests/test.sh": None, "tests/test.bat": ""},
        scan=False,
    ),
    Directory(
        id="1.2 windows with test.sh",
        says="A windows task with only test.sh: skipped, refused.",
        files={"task.toml": "[environment]\nos = 'windows'"},
        scan=False,
    ),
    Directory(
        id="1.2 test.sh is a directory",
        says="Only the existence of tests/test.sh is tested.",
        files={"tests/test.sh": None, "tests/test.sh/x": ""},
    ),
    Directory(
        id="1.2 shared with tests/Dockerfile",
        says="In shared mode tests/Dockerfile does not stand for test.sh.",
        files={"tests/test.sh": None, "tests/Dockerfile": "FROM a\n"},
        scan=False,
    ),
    Directory(
        id="1.2 separate with tests/Dockerfile",
        says="In separate mode the image of tests/Dockerfile owns the tests.",
        files={"task.toml": SEPARATE, "tests/test.sh": None, "tests/Dockerfile": "FROM a\n"},
    ),
    Directory(
        id="1.2 separate without any tests",
        says="In separate mode without an image of the verifier's own, test.sh is needed.",
        files={"task.toml": SEPARATE, "tests/test.sh": None},
        scan=False,
    ),
    Directory(
        id="1.2 a verifier image",
        says="With [verifier.environment].docker_image no tests/ are needed.",
        files={"task.toml": "[verifier.environment]\ndocker_image = 'a'", "tests/test.sh": None},
    ),
    Directory(
        id="1.2 steps/ without [[steps]]",
        says="steps/ alone makes no multi-step task: the rules of a single step apply.",
        files={"steps/a/instruction.md": "x", "steps/a/tests/test.sh": PASSES, "instruction.md": None},
        scan=False,
    ),
    Directory(
        id="1.2 a step without instruction",
        says="A missing step directory or step instruction: skipped, refused.",
        files={"task.toml": STEP, "steps/a/tests/test.sh": PASSES},
        scan=False,
    ),
    # 1.3 links
    Directory(
        id="1.3 a link out of the task",
        says="A link in tests/ that leaves the task is refused.",
        links={"tests/data": "../../elsewhere"},
        scan=False,
    ),
    Directory(
        id="1.3 a link out of a step",
        says="A link in steps/<name>/ that leaves the task is refused.",
        files={"task.toml": STEP, "steps/a/instruction.md": "x"},
        links={"steps/a/workdir": "/etc"},
        scan=False,
    ),
    Directory(
        id="1.3 a link that dangles inside",
        says="A dangling relative link inside the task is fine.",
        links={"tests/later": "../solution/answer"},
    ),
    Directory(
        id="1.3 links in a circle",
        says="Directories that link in a circle are refused.",
        files={"tests/data/x": ""},
        links={"tests/data/again": "../data"},
        scan=False,
    ),
    Directory(
        id="1.3 a link out of the agent's environment",
        says="In environment/ of the agent a link may leave the task.",
        links={"environment/data": "/etc/hostname"},
    ),
    Directory(
        id="1.3 a link out of the verifier's environment",
        says="In environment/ as the definition of a separate verifier it may not.",
        files={"task.toml": SEPARATE},
        links={"environment/data": "/etc/hostname"},
        scan=False,
    ),
    Directory(
        id="1.3 a link out that is left out",
        says="Paths that a .harborignore leaves out are not checked.",
        files={"tests/.harborignore": "data\n"},
        links={"tests/data": "/etc"},
    ),
    Episode(
        id="1.3 links inside are uploaded as links",
        says="Links that stay inside the task are uploaded as links.",
        files={"tests/test.sh": LISTS_TESTS, "tests/data": "x"},
        links={"tests/link": "data"},
        expected={"reward": 1, "files": {"verifier/test-stdout.txt": "data linkdata test.sh"}},
    ),
    # 1.3 .harborignore
    Episode(
        id="1.3 what .harborignore leaves out",
        says="Syntax of .gitignore with negation; the nearer rules win; the file itself is never uploaded.",
        files={
            "tests/test.sh": LISTS_TESTS,
            "tests/.harborignore": "*.log\n!kept.log\n/only-here\n",
            "tests/a.log": "",
            "tests/kept.log": "",
            "tests/only-here": "",
            "tests/sub/only-here": "",
            "tests/sub/.harborignore": "!b.log\nkept.log\n",
            "tests/sub/b.log": "",
            "tests/sub/kept.log": "",
        },
        expected={"files": {"verifier/test-stdout.txt": "kept.log sub sub/b.log sub/only-here test.sh"}},
    ),
    Episode(
        id="1.3 .harborignore elsewhere",
        says="A .harborignore at the root of the task has no effect.",
        files={"tests/test.sh": LISTS_TESTS, "tests/a.log": "", ".harborignore": "*.log\n"},
        expected={"files": {"verifier/test-stdout.txt": "a.log test.sh"}},
    ),
    Directory(
        id="1.3 test.sh is left out",
        says="Leaving out the entry script is an error; the scan says so, too.",
        files={"tests/.harborignore": "*.sh\n"},
        scan=False,
    ),
    Directory(
        id="1.3 test.sh is left out where an image has it",
        says="That is so only where the script would be uploaded.",
        files={"task.toml": SEPARATE, "tests/Dockerfile": "FROM a\n", "tests/.harborignore": "*.sh\n"},
    ),
    Episode(
        id="1.3 solution files are left out",
        says="It filters /solution as well.",
        files={
            "solution/solve.sh": "#!/bin/bash\nls /solution | paste -sd' '\n",
            "solution/.harborignore": "draft*\n",
            "solution/draft.md": "",
            "tests/test.sh": "#!/bin/bash\ncat /logs/agent/oracle.txt\necho 1 > /logs/verifier/reward.txt\n",
        },
        agent="oracle",
        expected={"files": {"verifier/test-stdout.txt": "solve.sh"}},
    ),
    # 1.4 instructions
    Reading(
        id="1.4 canary lines",
        says="Leading comment lines with the word canary are dropped, then blank lines; headings with it, too.",
        text="instruction.md",
        examples={
            "<!-- a CANARY -->\n\n \nDo it.\n": "Do it.\n",
            "# canary\n <!-- canary -->  \nDo it.": "Do it.",
            "# My canary project\nDo it.": "Do it.",
            "\n\nDo it.\n\n": "Do it.\n\n",
            "Do it.\n# canary\n": "Do it.\n# canary\n",
            "# Title\n# canary\n": "# Title\n# canary\n",
            "<!-- canary\n-->\nDo it.": "<!-- canary\n-->\nDo it.",
            "canary\nDo it.": "canary\nDo it.",
            "": "",
        },
    ),
    Episode(
        id="1.4 extra instructions",
        says="Extra instructions of the run follow, each after a blank line.",
        files={"instruction.md": "# canary\n\nDo it."},
        options={"extra_instructions": ["And this.", "And that."]},
        expected={"asked": ["Do it.\n\nAnd this.\n\nAnd that."]},
    ),
]
