"""Prompts of agents: templates of a folder, a user's own before the package's, and the results of commands in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.containers.container import ExecResult
from ares_exp.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def find_folders(own: Path, templates_dir: Path | None) -> list[Path]:
    """Returns the folders that templates are taken from, the user's first.

    Args:
        own: The agent's folder of the package.
        templates_dir: The user's.

    Raises:
        ConfigError: The user's is no folder.
    """
    if templates_dir is not None and not templates_dir.is_dir():
        raise ConfigError(f"Expected `agent.templates_dir` to be a folder of templates, got {templates_dir}.")
    return [path for path in (templates_dir, own) if path is not None]


def compile_templates(folders: Sequence[Path], names: Sequence[str]) -> list[Template]:
    """Compiles templates, each from the first folder that has it: compiling costs a hundred times what rendering does.

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
    template.globals = dict(template.globals)  # a chain of mappings, which takes longer to copy than all the rest
    return template


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
