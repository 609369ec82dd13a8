"""Address and credentials of the Daytona service, which are read only from environment variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ares_exp.errors import PreflightError
from ares_exp.records.secrets import protect

DEFAULT_API_URL = "https://app.daytona.io/api"

_API_KEY, _JWT_TOKEN = "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"
_ORGANIZATION_ID, _API_URL, _TARGET = "DAYTONA_ORGANIZATION_ID", "DAYTONA_API_URL", "DAYTONA_TARGET"
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # valid in a header and a URL: no space, line break or backslash


@dataclass(frozen=True, slots=True)
class Credentials:
    """Address and credentials of the service.

    Attributes:
        api_url: Address of the service's API, without a trailing slash.
        api_key: API key of an organisation.
        jwt_token: Token of a user, as an alternative to a key. It requires `organization_id`.
        organization_id: Organisation whose account the sandboxes belong to. Used only with `jwt_token`.
        target: Region of the sandboxes. `None`: the default region of the organisation.
    """

    api_url: str
    api_key: str | None = field(default=None, repr=False)
    jwt_token: str | None = field(default=None, repr=False)
    organization_id: str | None = None
    target: str | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """Reads the environment variables that Daytona's SDK documents. Then masks the secrets in all files and logs.

        Raises `PreflightError` if a variable is missing or unusable.
        """
        key, token, organization = _value(_API_KEY), _value(_JWT_TOKEN), _value(_ORGANIZATION_ID)
        protect(secret for secret in (key, token) if secret)
        if not key and not token:
            raise PreflightError(
                f"container=daytona needs credentials, but the environment has none. Set {_API_KEY} to a key from the "
                f"service's dashboard, or set {_JWT_TOKEN} and {_ORGANIZATION_ID}. Optionally set {_API_URL} to use a "
                f"service other than {DEFAULT_API_URL}, and {_TARGET} to choose a region. Files named .env are ignored."
            )
        if not key and not organization:
            raise PreflightError(
                f"{_JWT_TOKEN} is set without {_ORGANIZATION_ID}. Also set {_ORGANIZATION_ID} to the "
                f"organization that owns the sandboxes, or use {_API_KEY} instead of both."
            )
        return cls(
            api_url=_checked_url(_value(_API_URL) or DEFAULT_API_URL),
            api_key=key,
            jwt_token=None if key else token,
            organization_id=None if key else organization,
            target=_value(_TARGET),
        )


def has_credentials() -> bool:
    """Returns whether an environment variable contains a credential. Other required variables may still be missing."""
    return any(os.environ.get(name, "").strip() for name in (_API_KEY, _JWT_TOKEN))


def _value(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    if value and not _PRINTABLE.fullmatch(value):
        raise PreflightError(
            f"{name} contains a space, a line break or another character that keys and addresses cannot contain."
        )
    return value or None


def _checked_url(text: str) -> str:
    """Returns the API's address without a trailing slash. Raises `PreflightError` if it is malformed or unencrypted."""
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise PreflightError(
            f"{_API_URL} is not an address: {error}. Set it to an address such as {DEFAULT_API_URL}."
        ) from error
    if url.username is not None or "?" in text or "#" in text:
        raise PreflightError(
            f"{_API_URL} has a user, a query or a fragment. Set it to a plain address such as "
            f"{DEFAULT_API_URL}, and set {_API_KEY} to the key."
        )
    if url.scheme not in ("http", "https") or not host:
        raise PreflightError(f"Expected {_API_URL} to be an address like {DEFAULT_API_URL}, got {text!r}.")
    if url.scheme == "http" and host not in ("localhost", "127.0.0.1", "::1"):
        raise PreflightError(
            f"Expected {_API_URL} to start with https://, got {text}. Over http://, the key would be sent "
            "unencrypted. Use http:// only for a service on this machine."
        )
    return text.rstrip("/")
