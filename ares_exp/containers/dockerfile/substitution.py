"""Variables in a Dockerfile's words, as far as `dockerfile-parse` does not know them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DEFAULT = re.compile(r"(?<!\\)\$\{(\w+):([-+])((?:[^{}$]|\$(?=\w))*)\}")
_PLAIN = re.compile(r"\$(\w+)")
_TOO_COMPLEX = re.compile(r"\$\{\w*[^\w}]")


def simplify(text: str, variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Rewrites `${name:-default}` and `${name:+other}` as plain variables.

    Returns:
        The text, and the variables that it now needs.

    Raises:
        ValueError: Another form of substitution is left.
    """
    known = dict(variables)

    def replace(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        word = _PLAIN.sub(lambda inner: known.get(inner[1], ""), word)
        value, key = known.get(name, ""), f"_{len(known)}_"
        known[key] = (value or word) if operator == "-" else (word if value else "")
        return "${" + key + "}"

    simple = _DEFAULT.sub(replace, text)
    if _TOO_COMPLEX.search(simple):
        raise ValueError(f"a substitution in {text!r} is not known")
    return simple, known
