"""A printer for episodes in the terminal. For each request, it prints only the messages that are new."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.results import Outcome
from ares_exp.records.terminal_text import HEAD_LINES, TAIL_LINES, collapsed, count_of, one_line, printable
from ares_exp.trajectories.records import BackgroundRecord, EpisodeTrajectory, StepRecord, conversation_of, is_number
from ares_exp.trajectories.request_diff import RequestChange, is_request, request_change

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class EpisodeTotals:
    """Totals over the steps of an episode, such as tokens and cost. A total is `None` if it is unknown in every step.

    Attributes:
        prompt_tokens, generated_tokens: Token counts that the policy reported.
        reasoning_tokens: Number of generated tokens that are reasoning, if the policy reported it.
        cost: US dollars.
        duration_sec: Seconds of wall-clock time from the start to the end of the episode.
        policy_sec, environment_sec, container_sec: Sums of the fields of `StepRecord`.
        commands: Number of commands that the agent ran.
    """

    prompt_tokens: int | None
    generated_tokens: int | None
    reasoning_tokens: int | None
    cost: float | None
    duration_sec: float
    policy_sec: float | None
    environment_sec: float | None
    container_sec: float | None
    commands: int

    @classmethod
    def of(cls, trajectory: EpisodeTrajectory) -> EpisodeTotals:
        """Computes the totals of a trajectory."""
        steps = trajectory.steps
        actions = [step.action for step in steps if step.action is not None]
        usages = [usage for action in actions if isinstance(usage := action.get("usage"), Mapping)]
        return cls(
            prompt_tokens=_sum(usage.get("prompt_tokens") for usage in usages),
            generated_tokens=_sum(usage.get("generated_tokens") for usage in usages),
            reasoning_tokens=_sum(usage.get("reasoning_tokens") for usage in usages),
            cost=_sum(action.get("cost") for action in actions),
            duration_sec=trajectory.end_time - trajectory.start_time,
            policy_sec=_sum(step.policy_sec for step in steps),
            environment_sec=_sum(step.environment_sec for step in steps),
            container_sec=_sum(step.container_sec for step in steps),
            commands=sum(len(step.commands) for step in steps),
        )


def _sum(values: Any) -> Any:
    """Adds up the numbers in `values`, and ignores other types. Returns `None` if there is no number."""
    numbers = [value for value in values if is_number(value)]
    return sum(numbers) if numbers else None


REMOVED_LINES = 2
SIGNS = {"+": "green", "-": "red", " ": "dim"}
MODEL_FIELDS = ("model", "policy_version", "sampling")
"""Fields of a response that are printed only if they differ from the previous response."""


class EpisodePrinter:
    """Prints the header, the steps and the result of one episode."""

    def __init__(self, console: Console, trajectory: EpisodeTrajectory, *, full: bool = False) -> None:
        self._console = console
        self._trajectory = trajectory
        self._full = full
        self._model: Mapping[str, Any] = {}

    def header(self, path: Path, outcome: Outcome | None) -> None:
        """Prints facts about the episode, such as its cost. `outcome` is `None` while the episode is running."""
        episode, totals = self._trajectory, EpisodeTotals.of(self._trajectory)
        self._line(f"Episode {one_line(episode.episode_id)}", style="bold")
        reward = f"reward {number(episode.total_reward)}{by_name(episode.rewards)}"
        self._line(f"{one_line(episode.task_name)}  {outcome or 'running'}  {reward}", 2)
        parts = [count_of(episode.step_count, "step"), count_of(totals.commands, "command"), moment(episode.start_time)]
        tokens = usage(totals.prompt_tokens, totals.generated_tokens, totals.reasoning_tokens)
        parts += [seconds(totals.duration_sec), *spent(totals), *tokens]
        self._line(" · ".join([*parts, *price(totals.cost)]), 2)
        if episode.error is not None:
            self._text(f"{episode.error.type}: {episode.error.message}", 2, style="red")
        if episode.metadata:
            pairs = (f"{one_line(key)}={one_line(as_text(value))}" for key, value in episode.metadata.items())
            self._line("  ".join(pairs), 2, style="dim")
        self._line(str(path), 2, style="dim")

    def step(self, position: int) -> None:
        """Prints one step: its reply, commands and background requests, and the changes of its request."""
        step = self._trajectory.steps[position]
        self._done(step, step.step_type)
        if is_request(step.observation):
            self._request(request_change(self._trajectory.steps, position), step)
        elif step.observation is not None:
            self._line("observation", 2, style="bold")
            self._text(as_text(step.observation, indent=2), 4)

    def folded_step(self, position: int) -> None:
        """Prints the step at `position` in a few lines: its number, the start of the reply, and its commands."""
        step = self._trajectory.steps[position]
        reward = [f"reward {number(step.reward)}"] if step.reward else []
        said = _reply_text(step.action) if (step.action or {}).get("data") else step.step_type
        width = max(20, self._console.width - 2)
        self._line(one_line("  ".join([f"{step.step_index:>4}", *reward, said]), width), style="cyan")
        for command in step.commands:
            style = "dim" if command.exit_code == 0 else "red"
            self._line(one_line(f"$ {command.command}", width - 20) + f"  {ended(command)}", 6, style=style)

    def unfinished_step(self) -> None:
        """Prints the partial record of a step that raised an exception, if the episode has such a record."""
        if (step := self._trajectory.unfinished_step) is not None:
            self._done(step, "not finished")

    def result(self, verifier_output: Mapping[str, str]) -> None:
        """Prints the reward and the verifier's output files. `verifier_output` maps file names to file contents."""
        episode = self._trajectory
        self._line("")
        self._line(f"reward {number(episode.total_reward)}{by_name(episode.rewards)}", style="bold cyan")
        for name, text in verifier_output.items():
            self._line(name, 2, style="bold")
            self._wrapped(collapsed(text.rstrip("\n"), full=self._full, head=TAIL_LINES, tail=HEAD_LINES), 4)

    def _done(self, step: StepRecord, kind: str) -> None:
        parts = [f"step {step.step_index}", kind]
        parts += [f"{name} {number(value)}" for name, value in (("reward", step.reward), ("discount", step.discount))
                  if value is not None]  # fmt: skip
        self._line("")
        self._line("  ".join([*parts, *spent(step)]), style="bold cyan")
        if step.action is not None:
            self._action(step.action)
        for command in step.commands:
            self._command(command)
        for background_request in step.background_requests:
            self._background_request(background_request)

    def _background_request(self, background_request: BackgroundRecord) -> None:
        """Prints the last message of a background request, and the start of its response."""
        conversation = conversation_of(background_request.request)
        self._line(one_line(f"background request {conversation}: {asked_in(background_request)}"), 2, style="dim")
        self._line(one_line(_reply_text(background_request.response)), 4, style="dim")

    def _action(self, action: Mapping[str, Any]) -> None:
        tokens = action.get("usage")
        tokens = tokens if isinstance(tokens, Mapping) else {}
        notes = [
            *(str(action[name]) for name in ("finish_reason",) if action.get(name) is not None),
            *usage(tokens.get("prompt_tokens"), tokens.get("generated_tokens"), tokens.get("reasoning_tokens")),
            *price(action.get("cost")),
        ]
        self._line(f"reply  {one_line(' · '.join(notes))}", 2, style="bold")
        model = {name: action[name] for name in MODEL_FIELDS if action.get(name) not in (None, {})}
        for name, value in model.items():
            if self._model.get(name) != value:
                self._line(f"{name} {one_line(as_text(value))}", 4, style="magenta")
        self._model = model
        pieces = action.get("data")
        if not isinstance(pieces, tuple):
            self._text(as_text(action, indent=2), 4)
            return
        for piece in pieces:
            self._piece(piece)

    def _piece(self, piece: Any) -> None:
        text = piece_text(piece)
        if is_thinking(piece):
            self._line(f"thinking  ({len(text):,} characters)", 4, style="dim italic")
            self._text(text, 6, style="dim")
        else:
            self._text(text, 4)

    def _command(self, command: CommandRecord) -> None:
        first, *more = collapsed(command.command, full=self._full)
        style = "yellow" if command.exit_code == 0 else "bold yellow"
        self._wrapped([f"$ {first}", *(f"  {line}" for line in more)], 2, style=style)
        self._line(
            f"{ended(command)}  {seconds(command.duration_sec)}", 4, style="dim" if command.exit_code == 0 else "red"
        )

    def _request(self, change: RequestChange, step: StepRecord) -> None:
        for name, before, now in change.settings:
            self._setting(name, before, now)
        if change.base is not None and not change.is_previous:
            self._line(f"continues the conversation of step {change.base}", 2, style="magenta")
        removed, added = (sum(sign == wanted for sign, _ in change.edits) for wanted in "-+")
        if removed:
            what = f"history rewritten after message {change.kept - 1}" if change.kept else "history rewritten"
            self._line(f"{what}: {removed} removed, {added} added", 2, style="magenta")
        reply = "".join(piece_text(piece) for piece in (step.action or {}).get("data", ()) if is_text(piece))
        stayed = 0
        for sign, message in [*change.edits, ("", {})]:
            if sign == " ":
                stayed += 1
                continue
            if stayed:
                self._line(f"  {stayed} messages stay", 2, style="dim")
                stayed = 0
            if sign:
                self._message(sign, message, reply)

    def _message(self, sign: str, message: Mapping[str, Any], reply: str) -> None:
        text = message_text(message)
        is_reply = (
            sign == "+" and bool(reply) and message.get("role") == "assistant" and message.get("content") == reply
        )
        note = "the reply" if is_reply else f"{len(text):,} characters"
        self._line(f"{sign} {one_line(str(message.get('role')))}  ({note})", 2, style=SIGNS[sign])
        if not is_reply:
            self._text(text, 4, short=sign == "-")

    def _setting(self, name: str, before: Any, now: Any) -> None:
        if now is None:
            self._line(f"{one_line(name)} no longer set", 2, style="magenta")
            return
        is_replaced = before is not None and isinstance(now, str | int | float)
        text = f"{as_text(before)} -> {as_text(now)}" if is_replaced else as_text(now)
        if len(text) <= 100 and "\n" not in text:
            self._line(f"{one_line(name)} {text}", 2, style="magenta")
            return
        self._line(one_line(name), 2, style="magenta")
        self._text(text, 4)

    def _text(self, text: str, indent: int, *, style: str = "", short: bool = False) -> None:
        lines = collapsed(text, full=self._full, **({"head": REMOVED_LINES, "tail": 1} if short else {}))
        self._wrapped(lines, indent, style=style)

    def _line(self, line: str, indent: int = 0, *, style: str = "") -> None:
        self._wrapped([line], indent, style=style)

    def _wrapped(self, lines: Iterable[str], indent: int, *, style: str = "") -> None:
        from rich.text import Text

        width = max(20, self._console.width - indent)
        for line in lines:
            for part in (
                Text(printable(line), style=style).wrap(self._console, width, overflow="fold") if line else [Text()]
            ):
                part.rstrip()
                self._console.print(Text(" " * indent).append_text(part) if part else part, soft_wrap=True)


def _reply_text(response: Mapping[str, Any] | None) -> str:
    pieces = (response or {}).get("data")
    return " ".join(map(piece_text, itertools.filterfalse(is_thinking, pieces))) if isinstance(pieces, tuple) else ""


def ended(command: CommandRecord) -> str:
    """Describes how a command ended, such as `exit 1` or `timed out`."""
    if command.timed_out:
        return "timed out"
    return "killed" if command.exit_code is None else f"exit {command.exit_code}"


def as_text(value: Any, *, indent: int | None = None) -> str:
    """Returns a JSON value as text. A string is returned unchanged."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent)


def is_text(piece: Any) -> bool:
    """Returns whether a piece of a response is a text, and not reasoning or a tool call."""
    return isinstance(piece, Mapping) and piece.keys() == {"content"}


def is_thinking(piece: Any) -> bool:
    """Returns whether a piece of a response is reasoning."""
    return isinstance(piece, Mapping) and "thinking" in piece


def piece_text(piece: Any) -> str:
    """Formats a piece of a response, which is a text, reasoning or a tool call, as a string for the terminal."""
    if is_text(piece):
        return as_text(piece["content"])
    if is_thinking(piece):
        return "(encrypted)" if piece.get("redacted") else as_text(piece["thinking"])
    if isinstance(piece, Mapping) and piece.keys() == {"id", "name", "arguments"}:
        return f"call {as_text(piece['name'])} {as_text(piece['arguments'])}"
    return as_text(piece)


def message_text(message: Mapping[str, Any]) -> str:
    """Formats a message as text. Contains its content, its tool calls, and all other fields except the role."""
    content, parts = message.get("content"), []
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, tuple | list):
        parts += [as_text(one["text"] if isinstance(one, Mapping) and "text" in one else one) for one in content]
    elif content is not None:
        parts.append(as_text(content))
    for name, value in message.items():
        if name == "tool_calls" and isinstance(value, tuple | list):
            for call in value:
                function = call.get("function") if isinstance(call, Mapping) else None
                called = [function.get("name"), function.get("arguments")] if isinstance(function, Mapping) else [call]
                parts.append(" ".join(["call", *map(as_text, called)]))
        elif name not in ("role", "content"):
            parts.append(f"{name}: {as_text(value)}")
    return "\n".join(parts)


def number(value: Any) -> str:
    """Formats a number in few characters, such as `0.5` or `3`; returns `–` for `None`."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def by_name(rewards: Mapping[str, float]) -> str:
    """Formats rewards as in ` (reward 1, style 0.5)`; returns an empty string if the only reward is `reward`."""
    if not rewards.keys() - {"reward"}:
        return ""
    return f" ({', '.join(f'{one_line(name)} {number(value)}' for name, value in rewards.items())})"


def seconds(value: float) -> str:
    """Formats a duration in seconds with about three digits, of which at most two are decimals."""
    return f"{value:.0f} s" if abs(value) >= 100 else f"{round(value, 2):g} s" if abs(value) < 1 else f"{value:.1f} s"


def spent(source: StepRecord | EpisodeTotals) -> list[str]:
    """Describes the known durations of the policy, the environment and the container, as in `["policy 1.2 s"]`."""
    names = ("policy", "environment", "container")
    known = ((name, getattr(source, f"{name}_sec")) for name in names)
    return [f"{name} {seconds(value)}" for name, value in known if value is not None]


def usage(prompt: Any, generated: Any, reasoning: Any = None) -> list[str]:
    """Describes token counts, as in `["1,200 + 80 tokens"]` for the prompt and the response. Empty if unknown or 0."""
    numbers = [value for value in (prompt, generated) if isinstance(value, int)]
    thought = f" ({reasoning:,} of reasoning)" if isinstance(reasoning, int) and reasoning else ""
    return [f"{numbers[0]:,} + {numbers[1]:,} tokens{thought}"] if len(numbers) == 2 and any(numbers) else []


def price(cost: Any) -> list[str]:
    """Describes a cost as in `["$0.012"]`. Empty if it is unknown or 0."""
    return [f"${cost:.4g}"] if is_number(cost) and cost else []


def moment(epoch_seconds: float) -> str:
    """Formats a time as in `2026-01-31 12:00:00 UTC`. Returns the plain number if it is outside the supported range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(epoch_seconds))
    except (OverflowError, ValueError, OSError):
        return str(epoch_seconds)


def asked_in(background_request: BackgroundRecord) -> str:
    """Returns the text of the last message in a background request; `""` if there is no message."""
    request = background_request.request
    return message_text(request["messages"][-1]) if is_request(request) and request["messages"] else ""
