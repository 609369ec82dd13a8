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

    Compiling takes 100 times as long as rendering, so compile templates only once per factory. Raises `ConfigError` if
    a template does not compile.
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
    """Renders a command's result for the LLM. Removes the middle of an output longer than `max_output_chars`."""
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
