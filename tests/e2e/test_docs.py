"""Every command and example of the README and of the pages in docs/, as it stands there; their links; what they name.

The kind of a fence decides: `bash` and `python` blocks are run, and a block that starts with `# file: PATH` is written
to that file first. `console` and `py` blocks need a key, a network or a service: their run commands are only
composed.
"""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.options import OPTION_GROUPS, config_dirs_of
from ares_exp.config.overrides import flags_and_overrides
from ares_exp.config.schema import MADE_NODES
from ares_exp.runs.control.orders import Order
from ares_exp.tasks.task_set import SAMPLES
from tests.demo_models import demo_models
from tests.docs_reference.__main__ import DOCS
from tests.docs_reference.__main__ import PAGES as GENERATED
from tests.docs_reference.commands_page import comparable
from tests.docs_reference.config_page import chosen_options, known_keys
from tests.docs_reference.files_page import names, versions
from tests.docs_reference.markdown import anchors, links, without_fences
from tests.warm_start import warm_command

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent.parent
RUN, NOT_RUN = {"bash", "python", "json"}, {"console", "py", "text", "yaml", "toml", "bibtex"}
NODES = sorted((*OPTION_GROUPS, *MADE_NODES))


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        first = self.text.partition("\n")[0]
        return first.removeprefix("# file: ") if first.startswith("# file: ") else None


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def is_generated(self) -> bool:
        return "/reference/" in self.name

    @cached_property
    def blocks(self) -> list[Block]:
        found = re.finditer(r"^```(\w*)\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)
        return [Block(self.name, self.text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in found]


REPOSITORY = "https://github.com/ares-exp/ares_exp/blob/main/"
PAGES = [Page(path) for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob(".github/*.md"))]
README = PAGES[0]
BLOCKS = [block for page in PAGES for block in page.blocks]
SETUP = [block for block in BLOCKS if block.kind == "bash" and "venv" in block.text]
SESSIONS = ("docs/quickstart.md", "docs/tutorial.md", "docs/concepts.md")
"""Pages whose commands run in order in one shell, and print the `text` block that follows them."""


def lines_of(text: str) -> set[str]:
    """Returns the commands of a block, however the program is named there."""
    return {line.partition("  #")[0].replace("python -m ares_exp", "ares-exp").strip() for line in text.splitlines()}


COMMANDS: list[Block] = []
"""The blocks to run: each block, except blocks whose commands are in another block."""
for _block in BLOCKS:
    if (
        _block.kind == "bash"
        and _block not in SETUP
        and _block.page not in SESSIONS
        and not any(lines_of(_block.text) <= lines_of(other.text) for other in COMMANDS)
    ):
        COMMANDS.append(_block)
COVERED = (
    *("recipes", "report", "running", "snapshots", "statistics", "sweeps"),
    *("tasks", "trackers", "trajectories", "troubleshooting"),
)
"""Pages whose commands other end-to-end tests of the daily run cover, with other options."""
SCRIPTS = [block for block in BLOCKS if block.kind == "python" and block.file is None]
_PLAYS = re.compile(r"(python -m ares_exp|ares-exp) (--|\S+=)")
COMPOSED = [
    (block.id, line.partition("  #")[0].strip())
    for block in BLOCKS
    if block.kind == "console"
    for line in block.text.replace("\\\n", " ").splitlines()
    if _PLAYS.match(line) and "…" not in line and not re.search(r"(resume|replay|_from)=", line)
]


def blocks(chosen: Iterable[Block], *, always_local: bool = False) -> list[Any]:
    """Returns the parameters of a test. The daily run has the README's and each page's first without a kill."""
    pages = {f"docs/{name}.md" for name in COVERED}

    def marks(block: Block) -> list[pytest.MarkDecorator]:
        on_docker = "container=docker" in block.text and not always_local
        backend = pytest.mark.docker if on_docker else pytest.mark.local
        if block.page != README.name and (block.page in pages or "kill -9" in block.text):
            return [backend, pytest.mark.nightly]
        pages.add(block.page)
        return [backend]

    return [pytest.param(block, marks=marks(block), id=block.id) for block in chosen]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with two tasks: all that the pages take for granted."""
    for name in ("write-greeting", "count-records"):
        shutil.copytree(SAMPLES / name, tmp_path / "tasks" / name)
    return tmp_path


def write_files(page: str, here: Path) -> None:
    for block in BLOCKS:
        if block.page == page and block.file is not None:
            path = here / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text.partition("\n")[2])


def run(command: str, here: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of bash; what starts `ares_exp` there is a fork, but for what runs in the background."""
    shims = here / "shims"
    shims.mkdir(exist_ok=True)
    python = f'exec "{sys.executable}" "$@"\n'
    *client, _ = warm_command()
    fork = f'exec {shlex.join(client)} "$@"'
    module = f'case "$2" in ares_exp*) shift; {fork};; esac'
    scripts = {
        "python": f'[ -n "${{ALONE-}}" ] || case "${{1-}}" in -m) {module};; -W | *.py) {fork};; esac\n{python}',
        "python3": python,
        "ares-exp": 'exec python -m ares_exp "$@"\n',
    }
    command = re.sub(r"^(?=.* &$)", "ALONE=1 ", command, flags=re.MULTILINE)  # it is killed
    for name, script in scripts.items():
        (shims / name).write_text(f"#!/bin/sh\n{script}")
        (shims / name).chmod(0o755)
    path = f"{shims}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=here,
        env={**os.environ, "WANDB_MODE": "disabled", **env, "PATH": path},
        capture_output=True,
        text=True,
        timeout=250,  # for a machine many times slower
        check=False,
    )


def test_readme_starts_with_the_two_commands() -> None:
    assert README.blocks[:2] == SETUP
    assert "-m ares_exp" in SETUP[0].text
    assert "-m pytest" in SETUP[1].text
    lines = README.text.splitlines()
    for heading, block in zip(("Run the bundled tasks", "Run the tests"), SETUP, strict=True):  # .ci/run looks for them
        [line] = [number for number, line in enumerate(lines, 1) if line.startswith(heading)]
        assert line < block.line < line + 5


def test_readme_is_short() -> None:
    assert len(README.text.splitlines()) <= 180
    assert len(README.text.split()) <= 1700


def test_every_fence_has_a_known_kind() -> None:
    assert [block.id for block in BLOCKS if block.kind not in RUN | NOT_RUN] == []
    assert len(COMMANDS) >= 20
    assert len(SCRIPTS) >= 6
    assert len(COMPOSED) >= 10


def test_every_json_object_is_an_order() -> None:
    verbs = [Order.parse(block.text.encode()).verb for block in BLOCKS if block.kind == "json"]
    assert verbs == ["pause"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Page) -> None:
    dead = []
    for link in links(page.text):
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        if link.startswith(REPOSITORY):  # a page of the site that links to a file which the site lacks
            path = ROOT / target.removeprefix(REPOSITORY)
        elif link.startswith(("https://", "mailto:")):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            dead.append(link)
    assert dead == []


def test_api_page_has_every_public_name() -> None:
    names = re.findall(r"^::: (\S+)$", (DOCS / "reference/api.md").read_text(), re.MULTILINE)
    assert [name for name in names if not resolves(name)] == []
    assert {f"ares_exp.{name}" for name in ares_exp.__all__} <= set(names)


def test_site_has_at_most_40_pages() -> None:
    pages = [page for page in PAGES if page.path.is_relative_to(DOCS)]
    nav = (DOCS / "zensical.toml").read_text()
    assert [page.name for page in pages if page.path.relative_to(DOCS).as_posix() not in nav] == []
    assert len(pages) <= 40


def test_every_page_is_linked() -> None:
    linked = {
        (page.path.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in links(page.text)
        if not link.startswith(("https://", "#"))
    }
    lone = [page.name for page in PAGES[1:] if page.path.resolve() not in linked]
    assert lone == [".github/pull_request_template.md"]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    made, there = GENERATED[name](), (DOCS / name).read_text()
    if name == "reference/commands.md":
        made, there = comparable(made), comparable(there)
    assert there == made, "python -m tests.docs_reference writes it"


@pytest.mark.local
def test_every_run_directory_entry_is_documented(here: Path) -> None:
    run_ = "python -m ares_exp env.limit=1 snapshot=every_step 'tracker=[wandb,jsonl,tensorboard]' hydra.run.dir=run"
    done = run(f"{run_} 'collector=[json,jsonl]'", here, WANDB_MODE="offline")
    assert done.returncode == 0, done.stdout + done.stderr
    there = {path.name for path in (here / "run").iterdir()}
    assert there - set(names()) == set()
    assert len(there) >= 12


def test_package_and_format_versions_agree() -> None:
    [declared] = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == ares_exp.__version__
    assert f"version = {{{declared}}}" in README.text
    assert f"\nversion: {declared}\n" in (ROOT / ".github/CITATION.cff").read_text()
    newest = (DOCS / "changelog.md").read_text().partition("\n## ")[2].partition("\n## ")[0]
    assert declared in newest.partition("\n")[0]
    line = " ".join(newest.split()).partition("Formats written by this version: ")[2].partition(". ")[0]
    assert line == ", ".join(f"{name} {version}" for name, version in versions().items())


def test_readme_table_of_groups_has_every_option() -> None:
    section = README.text.partition("## Configuration")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    assert sorted(group for group, _ in rows) == sorted(OPTION_GROUPS)
    for group, options in rows:
        files = (ROOT / "conf" / group).glob("*.yaml")
        assert sorted(re.findall(r"`(\w+)`", options)) == sorted(path.stem for path in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_options_and_keys_exist(page: Page) -> None:
    text = re.sub(r"^```(?:python|py)\n.*?^```$", "", page.text, flags=re.DOTALL | re.MULTILINE)
    of_a_group = rf"(?<![\w@./-])({'|'.join(NODES)})"
    there = chosen_options() | set(re.findall(r"options/(\w+)/(\w+)\.yaml", page.text))
    there |= {("env", "nim"), ("policy", "mine"), ("container", "null")}
    assert sorted(set(re.findall(rf"{of_a_group}=([a-z]\w*)\b(?!=)", text)) - there) == []
    keys = re.findall(rf"{of_a_group}((?:\.[a-z]\w*)+)(?==|`)", without_fences(text))
    others = {"agent.name", "snapshot.json"}
    assert sorted({f"{group}{key}" for group, key in keys if not known_keys(f"{group}{key}")} - others) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_modules_and_files_exist(page: Page) -> None:
    prose = re.findall(r"`([^`\n]+)`", without_fences(page.text))
    paths = {word for text in prose for word in re.findall(r"^(?:ares_exp|tests|conf)/[\w/.-]*$", text)}
    of_tasks = {"tests/.harborignore", "tests/test.sh"}
    assert sorted(path for path in paths - of_tasks if not ((ROOT / path).exists() or path.endswith("-v0"))) == []
    dotted = {word for text in prose for word in re.findall(r"(?<![\w/.])ares_exp(?:\.\w+)+", text)}
    assert sorted(name for name in dotted - {"ares_exp.plugins"} if not resolves(name)) == []


def resolves(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if importlib.util.find_spec(owner) is None:
        return False
    module = importlib.import_module(owner)
    return hasattr(module, last) or importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if not page.is_generated], ids=lambda page: page.name)
def test_only_the_generated_page_lists_keys(page: Page) -> None:
    rows = re.findall(r"^\| `([\w.]+)`(?:, `[\w.]+`)* \|", page.text, re.MULTILINE)
    assert [key for key in rows if "." in key and known_keys(key)] == []


@pytest.mark.parametrize("block", blocks(COMMANDS))
def test_documented_command_succeeds(block: Block, here: Path, endpoint: Any) -> None:
    write_files(block.page, here)
    command = block.text.replace("http://127.0.0.1:8000/v1", endpoint.url)
    wandb = "offline" if block.page in ("README.md", "docs/trackers.md") else "disabled"  # where its files matter
    done = run(command, here, OPENAI_API_KEY="sk-test", WANDB_MODE=wandb)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"warning: .*(collector|tracker)\b.* failed", done.stderr), done.stderr
    assert done.stdout


def comparable_lines(text: str) -> list[str]:
    """Returns the lines of an output without times, dates, ids, rules and the width of columns."""
    text = re.sub(r"\d{4}-\d\d-\d\d[_ ]\d\d[-:]\d\d[-:]\d\d(_\d+)?", "DATE", text)
    text = re.sub(r"(?m)(?<=__\d__)[0-9a-f]{8}|\b(\d+ min )?[\d.]+ s\b|[\d.]+(?= kB| +DATE| +expected| │$)", "N", text)
    return [line for line in (re.sub(r"[ ─━]+", " ", line).strip() for line in text.splitlines()) if line]


@pytest.mark.local
@pytest.mark.parametrize("page", [page for page in PAGES if page.name in SESSIONS], ids=lambda page: page.name)
def test_documented_session_prints_the_shown_output(page: Page, tmp_path: Path) -> None:
    expected = [
        (block, after.text if after is not None and after.kind == "text" else "")
        for block, after in zip(page.blocks, [*page.blocks[1:], None], strict=True)
        if block.kind == "bash"
    ]
    script = "exec 2>&1; set +e\n" + "".join(f"{block.text}echo @@@\n" for block, _ in expected)
    with demo_models() as url:
        done = run(script.replace("http://127.0.0.1:8000/v1", url), tmp_path, COLUMNS="118")
    assert done.returncode == 0, done.stdout + done.stderr
    for (block, text), output in zip(expected, done.stdout.split("@@@\n")[:-1], strict=True):
        printed = iter(comparable_lines(output))
        missing = [line for line in comparable_lines(text) if line != "…" and line not in printed]
        assert missing == [], f"{block.id}:\n{output}"


@pytest.mark.parametrize(("where", "command"), COMPOSED, ids=[where for where, _ in COMPOSED])
def test_documented_command_is_composed(where: str, command: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(where.rpartition(":")[0], here)
    monkeypatch.chdir(here)
    words = shlex.split(command.replace("python -m ares_exp", "ares-exp", 1))[1:]
    flags, overrides = flags_and_overrides(words)
    assert {*flags} <= {"--config-dir", "options"}
    compose_config(overrides, config_dirs=config_dirs_of(words))


@pytest.mark.parametrize("block", blocks(SCRIPTS, always_local=True))
def test_documented_example_succeeds(block: Block, here: Path) -> None:
    write_files(block.page, here)
    for place in set(re.findall("outputs/(?:first|recorded)", block.text)):
        assert run(f"python -m ares_exp tracker=none hydra.run.dir={place}", here).returncode == 0
    (here / "example.py").write_text(block.text)
    done = run("python -W error example.py", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout
