"""The kinds of cases of the compatibility table: its rule, its input and its expected outcome.

The specification is what Harbor 0.25.0 does with a task. Its sections are numbered as in `table.TITLES`: 1 the task's
directory, 2 the life of a trial, 3 data sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

INVALID = "invalid"
"""What a reading gives for text that is refused."""

DONE = "done"
"""In `Episode.agent`: the agent says that it has finished (with the step, where a task has several)."""

HOST = {"A": "va", "E": ""}
"""Variables of the host, for readings of templates."""

PASSES = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
MINIMAL: Mapping[str, str] = {
    "task.toml": "",
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN mkdir -p /app\nWORKDIR /app\n",
    "tests/test.sh": PASSES,
}
"""A valid task of one step that is worth 1, whatever its agent does."""

Files = Mapping[str, str | None]
Text = Literal["task.toml", "instruction.md", "reward.txt", "reward.json", "template", "registry.json"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sentence of the specification, and what shows that it holds.

    Attributes:
        id: The section of the specification, and a unique name.
        says: The sentence.
        deviation: Why ares_exp does something else on purpose; empty where it does what the specification says.
    """

    id: str
    says: str
    deviation: str = ""

    @property
    def section(self) -> str:
        return self.id.partition(" ")[0]


@dataclass(frozen=True, kw_only=True)
class Reading(Case):
    """Text that is read without a task around it.

    Attributes:
        text: What the examples are.
        examples: Example, and what it is read as: a value, the name of an error, `INVALID`; of a task.toml, the values
            of some of its fields by their dotted names.
        reference: What Harbor reads it as, where that differs.
    """

    text: Text = "task.toml"
    examples: Mapping[str | bytes, Any]
    reference: Mapping[str | bytes, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Directory(Case):
    """A task directory that is read, and not run.

    Attributes:
        files: What differs from `MINIMAL`; `None` removes.
        links: Symbolic links, by their paths, and where they lead.
        scan: Whether the scan of its folder takes it for a task.
        load: Whether it loads when it is named; `None`: as the scan.
    """

    files: Files = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    scan: bool = True
    load: bool | None = None

    @property
    def loads(self) -> bool:
        return self.scan if self.load is None else self.load


@dataclass(frozen=True, kw_only=True)
class Episode(Case):
    """A task that is run: loaded, checked, run in a container, verified.

    Attributes:
        files, links: Same as in `Directory`.
        agent: The commands of a scripted policy, `DONE` after each step except the last; or `"oracle"`.
        raises: Whether the agent raises an exception after its first command.
        host: Variables of the host.
        options: Options of env=harbor.
        limits: Time limits of the run, as of `TimeLimits`.
        container: The backend.
        network: What container=local gives.
        needs_root: Whether container=local has to run as root, because commands run as other users.
        expected: Some of: `reward`, `rewards`, `error` (its class), `started` (whether it was found after the start of
            the container), `message` (texts in the error), `warnings` (texts in the warnings), `truncated_by`,
            `steps` (rewards by name), `files` (text of files of the episode, by path; `None`: missing), `manifest`
            (source, status), `asked` (texts in the agent's first request).
        reference: The same of Harbor, where it differs.
    """

    files: Files = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    agent: Sequence[str] | Literal["oracle"] = ()
    raises: bool = False
    host: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    container: Literal["local", "docker"] = "local"
    network: Literal["no-network", "public"] = "no-network"
    needs_root: bool = False
    expected: Mapping[str, Any]
    reference: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Containers(Case):
    """What a task asks of its containers, and of their networks; nothing is started.

    Attributes:
        files: Same as in `Directory`.
        expected: Fields of the container's specification as `agent.<field>`, of the verifier's own as
            `verifier.<field>`; networks of phases, of each step, as `networks`: between phases, agent, verifier.
    """

    files: Files = field(default_factory=dict)
    expected: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Limits(Case):
    """Time limits of a task under the limits of a run.

    Attributes:
        toml: The task.toml.
        limits: Same as in `TimeLimits`.
        expected: Seconds by phase; `None` is unlimited.
    """

    toml: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Selection(Case):
    """Tasks that are chosen from a folder, a registry.json or a git repository.

    Attributes:
        folders: Task directories to make, relative to the current directory.
        broken: Names of the invalid tasks.
        repository: Whether `folders` are in a git repository, of one commit.
        harbors_own: Whether that repository stands in for Harbor's own.
        registry: Data sets to write to a registry.json, in the repository or otherwise the current directory;
            `{repo}` and `{commit}` are replaced by the repository's path and commit.
        options: Options of env=harbor; `{repo}`, `{commit}` as above.
        expected: Names of tasks in order; or the error's class.
        reported: Texts in the messages to the user.
        reference: Harbor's outcome, if it differs from `expected`.
    """

    folders: Sequence[str] = ("a", "b")
    broken: Sequence[str] = ()
    repository: bool = False
    harbors_own: bool = False
    registry: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any]
    expected: Sequence[str] | str
    reported: Sequence[str] = ()
    reference: Sequence[str] | str | None = None


def write_task(root: Path, files: Files, links: Mapping[str, str] | None = None) -> Path:
    for relative, text in {**MINIMAL, **files}.items():
        if text is not None:
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            (root / relative).write_text(text, encoding="utf-8")
    for relative, target in (links or {}).items():
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        (root / relative).symlink_to(target)
    return root
