"""Prompt templates of agents, and the rendering of command results.

The user's custom templates take precedence over the templates in the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.containers.container import ExecResult
from ares_exp.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def find_folders(own: Path, templates_dir: Path | None) -> list[Path]:
    """Returns the folders to load templates from, the user's folder first.

    Args:
        own: Folder of the agent in the package.
        templates_dir: Folder of the user.

    Raises:
        ConfigError: `templates_dir` is not a directory.
    """
    if templates_dir is not None and not templates_dir.is_dir():
        raise ConfigError(f"Expected `agent.templates_dir` to be a folder of templates, got {templates_dir}.")
    return [path for path in (templates_dir, own) if path is not None]


def compile_templates(folders: Sequence[Path], names: Sequence[str]) -> list[Template]:
    """Compiles each template from the first folder that contains it.

    Compiling costs a hundred times as much as rendering.

    Raises:
        ConfigError: A template does not compile.
    """
    import jinja2

    loader = jinja2.FileSystemLoader(folders)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)
    return [_compile(environment, f"{name}.j2") for name in names]


def _compile(environment: Environment, name: str) -> Template:
    import jinja2

    try:
        template = environment.get_template(name)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The agent's template {error.filename or name}, line {error.lineno}: {error.message}"
        ) from None
    template.globals = dict(template.globals)  # a chain of mappings takes longer to copy than everything else
    return template


def render_result(template: Template, result: ExecResult, *, timeout_sec: float, max_output_chars: int) -> str:
    """Renders the result of a command.

    Args:
        template: Template of the agent.
        result: Result of the command.
        timeout_sec: Time limit of the command.
        max_output_chars: Length above which the output is shown as head and tail, half of the length each.
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
