"""Base classes of the bundled agents and their factories: shared options, prompt templates, skills, format errors."""

from __future__ import annotations

import logging
import posixpath
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import to_jsonable_python

from ares_exp.agents.code_agent import AgentContainer, AgentFactoryBase
from ares_exp.agents.conversation import TEMPLATES, CompactionKind
from ares_exp.containers.container import ExecResult
from ares_exp.errors import ConfigError, RepeatedFormatError
from ares_exp.llms.request import LLMClient
from ares_exp.tasks.task_contract import AgentContext

if TYPE_CHECKING:
    from jinja2 import Template

FormatErrors = Annotated[int, Field(ge=1)] | None
Tokens = Annotated[int, Field(gt=0)]
Outputs = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of a command with which the LLM submits."""

SHARED_OPTIONS = (
    *("format_errors_in_a_row", "templates_dir"),
    *("compaction", "compaction_tokens", "compaction_keeps"),
)


class ConversingAgentFactory(AgentFactoryBase):
    """A factory of agents that have a conversation with the LLM. Users can replace the prompts.

    Attributes:
        templates_folder: Folder of ares_exp with the default prompt templates.
        template_names: Names of the templates, without `.j2`. Default: the templates of an agent that runs commands.
        own_options: Names of the options that a subclass adds to `SHARED_OPTIONS`.
    """

    supports = frozenset({"messages", "skills_dir"})
    templates_folder: ClassVar[Path]
    template_names: ClassVar[tuple[str, ...]] = ("system", "instance", "observation", "format_error", "skills")
    own_options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        format_errors_in_a_row: FormatErrors,
        templates_dir: Path | None,
        compaction: CompactionKind,
        compaction_tokens: Tokens,
        compaction_keeps: Outputs,
    ) -> None:
        """Stores the options that all bundled agents share. The subclass has already validated their types.

        Args:
            format_errors_in_a_row: Number of consecutive malformed replies after which the episode is truncated and
                scored; `None` for no limit.
            templates_dir: Folder with custom templates. Default templates replace missing files.
            compaction: How to shorten a conversation that is too long. `none` keeps it unchanged. `drop_outputs`
                replaces all outputs except the most recent ones by their lengths. `summarise` replaces everything after
                the task by a summary, which the agent requests from the LLM in a separate step.
            compaction_tokens: Length at which a conversation is shortened, in tokens as counted by the engine. If the
                engine does not count them, four characters count as one token.
            compaction_keeps: Number of most recent outputs that `drop_outputs` keeps.
        """
        self.format_errors_in_a_row = format_errors_in_a_row
        self.templates_dir = templates_dir
        self.compaction: CompactionKind = compaction
        self.compaction_tokens = compaction_tokens
        self.compaction_keeps = compaction_keeps

    @property
    def options(self) -> dict[str, Any]:
        """Constructor options as JSON-ready data."""
        return dict(to_jsonable_python({name: getattr(self, name) for name in (*self.own_options, *SHARED_OPTIONS)}))

    @cached_property
    def templates(self) -> Any:
        """Compiled templates by name, each from `templates_dir` or, if it has no such file, from ares_exp.

        Compiling takes 100 times as long as rendering.

        Raises:
            ConfigError: `templates_dir` is not a directory, or a template does not compile.
        """
        import jinja2

        if self.templates_dir is not None and not self.templates_dir.is_dir():
            raise ConfigError(f"Expected `agent.templates_dir` to be a folder of templates, got {self.templates_dir}.")
        folders = [self.templates_dir or self.templates_folder, self.templates_folder, TEMPLATES]
        loader = jinja2.FileSystemLoader(folders)
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)
        compiled = SimpleNamespace()
        for name in (*self.template_names, "summarise", "handoff"):
            try:
                template = environment.get_template(f"{name}.j2")
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"The template {error.filename or name} has an error in line {error.lineno}: {error.message}"
                ) from None
            template.globals = dict(template.globals)  # a chain of mappings takes longer to copy than everything else
            setattr(compiled, name, template)
        return compiled

    async def preflight(self) -> None:
        """Compiles the templates. Raises `ConfigError` under the same conditions as `templates`."""
        _ = self.templates


class ConversingAgent:
    """The base class of the bundled agents, which count the LLM's malformed replies in `format_errors`."""

    _options: Any

    def __init__(self, options: Any, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self._options = options
        self._container = container
        self._llm = llm_client
        self._context = AgentContext()
        self._in_a_row = 0
        self.format_errors = 0

    def set_context(self, context: AgentContext) -> None:
        """Stores the task's context. `run` sends the context's messages before the task, and its skills in the task."""
        self._context = context

    async def _skills(self, template: Template, timeout_sec: float) -> str:
        """Returns a description of the task's skills for the LLM, or an empty string if the task has no skills."""
        if self._context.skills_dir is None:
            return ""
        skills = await find_skills(self._container, self._context.skills_dir, timeout_sec=timeout_sec)
        return template.render(skills=skills) if skills else ""

    async def _observe(self, command: str, *, timeout_sec: float, may_submit: bool = True) -> str | None:
        """Runs a command of the LLM, and returns its result as text for the LLM.

        Removes the middle of an output longer than `max_output_chars`. With `may_submit`, returns `None` if the first
        line of the output is `SUBMIT`.
        """
        try:
            result = await self._container.exec(command, timeout_sec=timeout_sec)
        except ValueError as error:  # for example, a NUL, which no shell accepts
            result = ExecResult(output=f"{error}\n", exit_code=126, duration_sec=0.0)
        output, half = result.output, self._options.max_output_chars // 2
        if may_submit and output.lstrip().partition("\n")[0].strip() == SUBMIT:
            return None
        cut = len(output) > self._options.max_output_chars
        return str(
            self._options.templates.observation.render(
                timed_out=result.timed_out,
                timeout_sec=f"{timeout_sec:g}",
                exit_code=result.exit_code,
                head=output[:half] if cut else output,
                tail=output[-half:] if cut else "",
                elided_chars=len(output) - 2 * half + result.elided_bytes if cut else result.elided_bytes,
            )
        )

    def _count_format_error(self, problem: str) -> None:
        """Counts a malformed reply. After `format_errors_in_a_row` such replies in a row, raises `RepeatedFormatError`.

        `problem` is the end of the error message, such as `had no usable tool call`.
        """
        self._in_a_row += 1
        self.format_errors += 1
        if self._in_a_row == self._options.format_errors_in_a_row:
            raise RepeatedFormatError(f"The agent stopped, because {self._in_a_row} replies in a row {problem}.")


MAX_SKILLS = 100
MAX_HEAD_BYTES = 4096
MAX_DESCRIPTION_CHARS = 1024

_logger = logging.getLogger(__name__)

_FIELD = re.compile(r"(name|description):[ \t]*(.*)")
_FOLDED = re.compile(r"[>|][+-]?\d?")


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill of a task: a directory in the container with instructions in `SKILL.md`.

    Attributes:
        name: Name from `SKILL.md`; defaults to the name of the directory.
        description: Purpose of the skill; empty if `SKILL.md` has no description.
        path: Path of `SKILL.md` in the container.
    """

    name: str
    description: str
    path: str


async def find_skills(container: AgentContainer, folder: str, *, timeout_sec: float) -> list[Skill]:
    """Returns the skills in a directory in the container (`*/SKILL.md`), sorted by path. Logs a warning if none exists.

    Raises:
        ContainerError: The container failed.
    """
    shown = f'n=$((n + 1)); printf "\\0%s\\0" "$f"; head -c {MAX_HEAD_BYTES} "$f" | tr -d "\\0"'
    each = f'[ -f "$f" ] || continue; [ "$n" -lt {MAX_SKILLS} ] || break; {shown}'
    result = await container.exec(
        f"cd {shlex.quote(folder)} && n=0 && for f in */SKILL.md; do {each}; done", timeout_sec=timeout_sec
    )
    parts = result.output.split("\0")[1:]
    if not parts:
        _logger.warning("The agent receives no skills: no subfolder of %s in its container has a SKILL.md.", folder)
    return [read_skill(text, posixpath.join(folder, path)) for path, text in zip(parts[::2], parts[1::2], strict=False)]


def read_skill(text: str, path: str) -> Skill:
    """Creates a skill from the first bytes (`text`) of the file `SKILL.md` at `path`."""
    fields = _front_matter(text)
    name = fields.get("name") or posixpath.basename(posixpath.dirname(path))
    return Skill(name[:100], fields.get("description", "")[:MAX_DESCRIPTION_CHARS], path)


def _front_matter(text: str) -> dict[str, str]:
    """Reads `name` and `description` from the YAML front matter, the lines between two `---` lines.

    Does not use a YAML parser: only plain and quoted values and indented blocks are supported.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        return {}
    fields: dict[str, str] = {}
    field = None
    for line in lines[1:]:
        if line.rstrip() in ("---", "..."):
            break
        if found := _FIELD.fullmatch(line):
            field, value = found[1], found[2].strip()
            fields[field] = "" if _FOLDED.fullmatch(value) else value
        elif field is not None and line[:1].isspace():
            fields[field] = f"{fields[field]} {line.strip()}".strip()
        else:
            field = None
    return {name: _unquoted(value) for name, value in fields.items()}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
