"""API keys and errors in the format of OpenAI's HTTP interfaces."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_FIELD = re.compile(r"`([^`]+)`")


def bearer(headers: Mapping[str, str]) -> str | None:
    """Returns the key from the header `Authorization: Bearer KEY`, or `None` without such a header."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def error_object(status: int, message: str) -> dict[str, str | None]:
    """Returns the JSON object for an error. For status 400, `param` is the first name in backticks in the message."""
    field = _FIELD.search(message) if status == 400 else None
    return {
        "message": message,
        "type": _TYPES.get(status, "server_error"),
        "param": field[1] if field else None,
        "code": None,
    }
