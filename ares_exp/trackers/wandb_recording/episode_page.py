"""A trajectory as a page of HTML, to be read beside its row: bounded, escaped, without known secrets."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ares_exp.records.secrets import mask_known_secrets
from ares_exp.terminal.terminal import collapsed, one_line
from ares_exp.trajectories.commands.episode_printer import (
    as_text,
    is_thinking,
    message_text,
    number,
    piece_text,
    problem,
    seconds,
)
from ares_exp.trajectories.commands.request_change import is_request, request_change
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

FIRST_STEPS, LAST_STEPS = 20, 20
"""Of a longer episode these steps are shown."""
SHOWN_OF_A_STEP = 12
"""So many of the messages, pieces and commands of a step are shown, each as the command line shows long texts."""

_STYLE = (
    "body{font:13px sans-serif;margin:8px}pre{margin:2px 0 6px;white-space:pre-wrap;background:#f5f5f5;padding:4px}"
    "h4{margin:10px 0 2px}.bad{color:#b00020}.dim{color:#777}"
)


def episode_page(trajectory: EpisodeTrajectory) -> str:
    """Returns the page of an episode, without the middle of long texts and long episodes."""
    steps, hidden = trajectory.steps, len(trajectory.steps) - FIRST_STEPS - LAST_STEPS
    blocks = [*_header(trajectory)]
    for position in range(len(steps)):
        if position < FIRST_STEPS or position >= FIRST_STEPS + hidden:
            blocks += _step(trajectory, position)
        elif position == FIRST_STEPS:
            blocks.append(_line("p", f"… {hidden} steps …", "dim"))
    if trajectory.unfinished_step is not None:
        blocks += _done(trajectory.unfinished_step, "not finished")
    return f'<!doctype html><meta charset="utf-8"><style>{_STYLE}</style>{"".join(blocks)}'


def _header(trajectory: EpisodeTrajectory) -> Iterator[str]:
    yield _line("h3", f"{trajectory.task_name}: {trajectory.outcome}, reward {number(trajectory.total_reward)}")
    yield _line("p", trajectory.episode_id, "dim")
    if trajectory.error is not None:
        yield _text(problem(trajectory.error), "bad")


def _step(trajectory: EpisodeTrajectory, position: int) -> Iterator[str]:
    step = trajectory.steps[position]
    yield from _done(step, step.step_type)
    if not is_request(step.observation):
        if step.observation is not None:
            yield _text(as_text(step.observation, indent=2))
        return
    for sign, message in request_change(trajectory.steps, position).edits[:SHOWN_OF_A_STEP]:
        if sign == "+" and not (message.get("role") == "assistant" and position):  # the reply is shown as such
            yield _line("p", f"{message.get('role')}", "dim")
            yield _text(message_text(message))
        elif sign == "-":
            yield _line("p", f"removed: {message.get('role')}", "dim")


def _done(step: StepRecord, kind: str) -> Iterator[str]:
    """The reply and the commands that led to a step."""
    reward = "" if step.reward is None else f", reward {number(step.reward)}"
    yield _line("h4", f"step {step.step_index} ({kind}{reward})")
    if step.action is not None:
        pieces = step.action.get("data")
        shown = pieces[:SHOWN_OF_A_STEP] if isinstance(pieces, tuple) else (step.action,)
        for piece in shown:
            if is_thinking(piece):
                yield _line("p", "thinking", "dim")
            yield _text(piece_text(piece), "dim" if is_thinking(piece) else "")
    for command in step.commands[:SHOWN_OF_A_STEP]:
        ended = (
            "timed out" if command.timed_out else "killed" if command.exit_code is None else f"exit {command.exit_code}"
        )
        yield _text(f"$ {command.command}")
        yield _line("p", f"{ended}, {seconds(command.duration_sec)}", "dim" if command.exit_code == 0 else "bad")


def _line(tag: str, text: str, style: str = "") -> str:
    return f"<{tag}{_class(style)}>{escape(one_line(mask_known_secrets(text), 300))}</{tag}>"


def _text(text: str, style: str = "") -> str:
    # Masked before anything is cut or escaped: half a secret, or an escaped one, would no more be known.
    return f"<pre{_class(style)}>{escape(chr(10).join(collapsed(mask_known_secrets(text))))}</pre>"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""
