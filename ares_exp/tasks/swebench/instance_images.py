"""Names of the images that are published for SWE-bench."""

from __future__ import annotations

import re

from ares_exp.errors import ConfigError
from ares_exp.tasks.swebench.rows import SweBenchRow

IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}")


def image_name(row: SweBenchRow, template: str | None) -> str:
    """Returns the image of a row: by `template` if there is one, else the row's own, else that of the convention.

    Args:
        row: The row.
        template: A name with `{id}` in it: the `instance_id` in small letters, `_1776_` for `__`, which registries do
            not take.
    """
    if template is None:
        return row.image or _filled(IMAGE, row.instance_id)
    return _filled(template, row.instance_id)


def check_template(template: str | None) -> str | None:
    """Returns the template unchanged.

    Raises:
        ConfigError: It gives no names of images, or one name to all rows.
    """
    if template is not None and ("{id}" not in template or not _REFERENCE.fullmatch(_filled(template, "a"))):
        raise ConfigError(
            f"Expected `env.image_template` to be the name of an image with {{id}} in it, as {IMAGE!r}, got "
            f"{template!r:.200}."
        )
    return template


def _filled(template: str, instance_id: str) -> str:
    return template.replace("{id}", instance_id.lower().replace("__", "_1776_"))
