"""Templates `${NAME}` and `${NAME:-default}` in `env` tables of task.toml, for environment variables of the host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from ares_exp.errors import TaskError
from ares_exp.records.secrets import is_sensitive

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIN_SECRET_LENGTH = 8


def resolve_env(table: Mapping[str, str], *, where: str, host: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns an `env` table in which each template is replaced by the value of the host's environment variable.

    A variable with an empty value counts as set, so the default of the template is not used. `where` is the name of the
    table in messages, such as `task.toml: [verifier.env]`.

    Raises:
        TaskError: A variable without a default is not set on the host, or the table contains an invalid name or value.
    """
    resolved = {}
    for key, value in table.items():
        if not _NAME.fullmatch(key) or "\0" in value:
            raise TaskError(f"{where} {key!r}: expected a variable name (letters, digits, _) and a value without NUL.")
        name, default = match.groups() if (match := _TEMPLATE.fullmatch(value)) else ("", value)
        if (found := host.get(name, default)) is None:
            raise TaskError(
                f"{where} {key}: the host variable {name!r} is not set. Set the variable before the run, or add "
                f"a default to the template: ${{{name}:-…}}."
            )
        resolved[key] = found
    return resolved


def secret_values(tables: Iterable[Mapping[str, str]], *, host: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the secrets in `tables`, longest first, so that a secret is masked before any secret that it contains.

    A secret is the value of a host variable that a template uses, if the key or the variable has a sensitive name such
    as `API_KEY`. Values with fewer than 8 characters are omitted, because other texts may contain them by chance.
    """
    found = ((key, _TEMPLATE.fullmatch(value)) for table in tables for key, value in table.items())
    names = {match[1] for key, match in found if match and (is_sensitive(key) or is_sensitive(match[1]))}
    values = {host.get(name, "") for name in names}
    return tuple(sorted((value for value in values if len(value) >= _MIN_SECRET_LENGTH), key=len, reverse=True))
