"""Tools whose calls are written in another form than a function's, on wires that have such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How the calls of one tool are written.

    Attributes:
        kind: `"function"`: arguments are JSON; `"custom"`: they are free text, which a policy sees as a function with
            one argument `input`; `"local_shell"`: they are an action.
        name: Its name on the wire.
        namespace: The group that it belongs to on the wire, or `None`.
    """

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None
