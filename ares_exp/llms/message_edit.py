"""Edits of the conversation that a policy sees: a message put in, or the text of one replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from ares_exp.llms.request import LLMRequest


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """One change, in every request from a time step on that reaches so far.

    The agent knows nothing of it: what it asks next repeats its own messages, and is shown with the same change.

    Attributes:
        kind: `"insert"` puts a user message before the message at `index`; `"replace"` gives that one another text.
        index: Position in the messages, from 0.
        text: The text.
        step: The first time step whose request is shown so; those before were shown as they were.
    """

    kind: Literal["insert", "replace"]
    index: int
    text: str
    step: int

    def apply(self, request: LLMRequest) -> LLMRequest:
        """Returns the request as the policy sees it."""
        messages = list(request.messages)
        if self.kind == "insert" and self.index <= len(messages):
            messages.insert(self.index, {"role": "user", "content": self.text})
        elif self.kind == "replace" and self.index < len(messages):
            messages[self.index] = {**messages[self.index], "content": self.text}
        return replace(request, messages=messages)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        return {"kind": self.kind, "index": self.index, "text": self.text, "step": self.step}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads the form of `to_dict`.

        Raises:
            ValueError: It is no such thing.
        """
        kind, index, text, step = (data.get(name) for name in ("kind", "index", "text", "step"))
        if (
            kind not in ("insert", "replace")
            or not (isinstance(index, int) and index >= 0)
            or not isinstance(text, str)
            or not (isinstance(step, int) and step >= 0)
        ):
            raise ValueError(f"expected kind, index, text and step of a message edit, got {data!r:.100}")
        return cls(kind, index, text, step)


def recorded_edits(metadata: Mapping[str, Any]) -> tuple[MessageEdit, ...]:
    """Reads the edits that a recorded trajectory was played with; anything else is left out."""
    found = metadata.get("edits")
    edits: list[MessageEdit] = []
    for one in found if isinstance(found, Sequence) else ():
        with suppress(ValueError, AttributeError):
            edits.append(MessageEdit.from_dict(one))
    return tuple(edits)


def edited(request: LLMRequest, edits: Iterable[MessageEdit], step: int) -> LLMRequest:
    """Returns the request of a time step as the policy sees it, or saw it."""
    for edit in edits:
        if edit.step <= step:
            request = edit.apply(request)
    return request
