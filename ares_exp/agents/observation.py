"""Results of commands as an LLM is shown them: with exit code, and of long outputs head and tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ares_exp.containers.container import ExecResult

if TYPE_CHECKING:
    from jinja2 import Template


def render_result(template: Template, result: ExecResult, *, timeout_sec: float, max_output_chars: int) -> str:
    """Renders the result of a command.

    Args:
        template: The agent's.
        result: The result.
        timeout_sec: The command's time limit.
        max_output_chars: Longer outputs are shown as head and tail, half each.
    """
    output, half = result.output, max_output_chars // 2
    cut = len(output) > max_output_chars
    return template.render(
        timed_out=result.timed_out,
        timeout_sec=f"{timeout_sec:g}",
        exit_code=result.exit_code,
        head=output[:half] if cut else output,
        tail=output[-half:] if cut else "",
        elided_chars=len(output) - 2 * half + result.elided_bytes if cut else result.elided_bytes,
    )
