"""The wires that an endpoint serves."""

from __future__ import annotations

from ares_exp.agents.interception.served_chat import ChatCompletionsWire
from ares_exp.agents.interception.served_messages import MessagesWire
from ares_exp.agents.interception.served_responses import ResponsesWire
from ares_exp.agents.interception.served_wire import Wire

WIRES: tuple[Wire, ...] = (ChatCompletionsWire(), ResponsesWire(), MessagesWire())
"""One of each."""


def wire_at(path: str) -> Wire | None:
    """Returns the wire whose requests, or requests for counts, have this path; `None` where none has."""
    return next((wire for wire in WIRES if path in (wire.path, wire.count_path)), None)
