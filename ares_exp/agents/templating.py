"""Compiling of the agents' prompt templates, and rendering of command results with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.containers.container import ExecResult
from ares_exp.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template


def compile_templates(folders: Sequence[Path], names: Sequence[str]) -> list[Template]:
    """Compiles the template files `NAME.j2`, each from the first folder that contains it.

    Compile templates only once per factory, because compiling takes 100 times as long as rendering.

    Raises:
        ConfigError: A template does not compile.
    """
    import jinja2

    loader = jinja2.FileSystemLoader(folders)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)
    templates = []
    for name in names:
        try:
            template = environment.get_template(f"{name}.j2")
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"The template {error.filename or name} has an error in line {error.lineno}: {error.message}"
            ) from None
        template.globals = dict(template.globals)  # a chain of mappings takes longer to copy than everything else
        templates.append(template)
    return templates


def render_result(template: Template, result: ExecResult, *, timeout_sec: float, max_output_chars: int) -> str:
    """Returns the message that shows the result of a command to the LLM.

    If the output is longer than `max_output_chars`, its middle is removed.
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
