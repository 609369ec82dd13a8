"""Base classes of the bundled agents and their factories: shared options, prompt templates, skills, format errors.

`Conversation` is an agent's conversation with its LLM. It can shorten long conversations (compaction). The option
`compaction` of the bundled agents selects one of three methods:

- `none`: the conversation is never shortened.
- `drop_outputs`: each output of a command, except the most recent ones, is replaced by a line with its length.
- `summarise`: the agent asks the LLM for a summary, which replaces everything after the task. This request is a step of
  the episode, with tokens, a cost and a place in the trajectory.

The length of a conversation is the number of tokens that the inference engine reports with each response. If the engine
reports no tokens, four characters count as one token. The length depends only on messages and responses. A replayed
agent therefore shortens the conversation at the same point as before.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python

from ares_exp.agents.code_agent import AgentContainer, AgentFactoryBase
from ares_exp.containers.container import ExecResult
from ares_exp.errors import ConfigError, RepeatedFormatError
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
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


def as_plain_chat(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Converts messages for a chat without tools. Calls become text. Tool and system messages become user messages."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    if message.get("role") != "assistant":
        return Message(role="user", content=content)
    calls = [
        f"<tool_call>{json.dumps(dict(call.get('function', {})), ensure_ascii=False)}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if calls and isinstance(content, str):
        content = "\n".join(([content] if content else []) + calls)
    elif calls:
        content = [*content, {"type": "text", "text": "\n".join(calls)}]
    return Message(role="assistant", content=content)


CompactionKind = Literal["none", "drop_outputs", "summarise"]

TEMPLATES = Path(__file__).parent / "context_templates"
CHARS_PER_TOKEN = 4
LEAST_MESSAGES = 4
"""Minimum number of messages after the task to summarise. A summary of fewer messages might not be shorter."""
KEPT_CHARS = 200
"""Maximum length in characters of an output that `drop_outputs` keeps, however old it is."""


class Conversation:
    """A conversation with an LLM. Use `add` to append messages, then `ask` for a response."""

    def __init__(
        self,
        llm_client: LLMClient,
        start: Sequence[Message],
        *,
        options: ConversingAgentFactory,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        state: Callable[[], str] = str,
    ) -> None:
        """Starts the conversation.

        Args:
            llm_client: Client to send requests to.
            start: Messages that are never removed. The last message is the user message with the task.
            options: Factory of the agent, with the options and the templates for the compaction.
            system_prompt: System prompt.
            tools: Definitions of the tools that the LLM may call.
            state: Function whose return value, such as the text on the current screen, is appended to each summary. The
                value may be empty.
        """
        self._llm = llm_client
        self._task = tuple(start)
        self._start = list(start)
        self._rest: list[Message] = []
        self._options = options
        self._system_prompt = system_prompt
        self._tools = tools
        self._state = state
        self._answered_tokens = 0
        self._chars_since = 0

    def add(self, *messages: Message) -> None:
        """Appends messages to the conversation."""
        self._rest += messages
        if self._options.compaction != "none":
            self._chars_since += sum(map(_chars, messages))

    async def ask(self) -> LLMResponse:
        """Shortens the conversation if it is too long, then returns the next response. The caller has to `add` it."""
        if self._options.compaction != "none" and self._tokens() > self._options.compaction_tokens:
            if self._options.compaction == "drop_outputs" or not await self._summarise():
                self._drop_outputs()
            self._answered_tokens = 0  # the engine's count was for the previous conversation
        response = await self._llm(self._request([*self._start, *self._rest]))
        if tokens := response.usage.total_tokens:
            self._answered_tokens = tokens
            self._chars_since = -len(response.text)  # the tokens of the response are already counted
        return response

    def _request(self, messages: Sequence[Message], tool_choice: str | None = None) -> LLMRequest:
        return LLMRequest(messages, system_prompt=self._system_prompt, tools=self._tools, tool_choice=tool_choice)

    def _tokens(self) -> int:
        if self._answered_tokens:
            return self._answered_tokens + max(0, self._chars_since) // CHARS_PER_TOKEN
        messages = [*self._start, *self._rest]
        return (len(self._system_prompt or "") + sum(map(_chars, messages))) // CHARS_PER_TOKEN

    async def _summarise(self) -> bool:
        """Asks the LLM for a summary, and replaces all messages after the task with it.

        Returns `False` if the response was empty. Returns `True` without a request if the conversation has fewer than
        `LEAST_MESSAGES` messages after the task.
        """
        if len(self._rest) < LEAST_MESSAGES:
            return True
        question = self._options.templates.summarise.render()
        asked = _with_user_text([*self._start, *self._rest], question)
        reply = await self._llm(self._request(asked, tool_choice=None if self._tools is None else "none"))
        summary = reply.text.strip()
        if summary:
            handoff = self._options.templates.handoff.render(summary=summary)
            self._rest = []
            self._start = _with_user_text(self._task, "\n\n".join(filter(None, (handoff, self._state()))))
        return bool(summary)

    def _drop_outputs(self) -> None:
        outputs = [place for place, message in enumerate(self._rest) if message["role"] != "assistant"]
        for place in outputs[: len(outputs) - self._options.compaction_keeps]:
            message = self._rest[place]
            if (chars := len(str(message.get("content") or ""))) > KEPT_CHARS:
                self._rest[place] = Message({**message, "content": f"[An output of {chars} characters was here.]"})


def _with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Returns the messages with a user text at the end. If the last message is a user message, extends that message."""
    last = messages[-1]
    if last["role"] != "user" or not isinstance(last["content"], str):
        return [*messages, Message(role="user", content=text)]
    return [*messages[:-1], Message({**last, "content": f"{last['content']}\n\n{text}"})]


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list | tuple) else 0
