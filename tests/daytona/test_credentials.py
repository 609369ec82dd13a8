"""Credentials: how they are read from the environment, which are rejected, and that none of them is shown."""

import pytest

from ares_exp.containers.daytona.service import DEFAULT_API_URL, Credentials, has_credentials
from ares_exp.errors import PreflightError
from ares_exp.records.secrets import mask_known_secrets

KEY = "dtn_0123456789abcdef"
TOKEN = "eyJhbGciOiJub25lIn0.e30.c2lnbmF0dXJl"


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID", "API_URL", "TARGET"):
        monkeypatch.delenv(f"DAYTONA_{name}", raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"DAYTONA_{name}", value)


@pytest.mark.parametrize(("values", "expected"), [
    ({"API_KEY": KEY}, Credentials(DEFAULT_API_URL, api_key=KEY)),
    (
        {"API_KEY": f"{KEY}\n", "API_URL": "https://daytona.example.org:8443/api/", "TARGET": "eu"},
        Credentials("https://daytona.example.org:8443/api", api_key=KEY, target="eu"),
    ),
    (
        {"JWT_TOKEN": TOKEN, "ORGANIZATION_ID": "org"},
        Credentials(DEFAULT_API_URL, jwt_token=TOKEN, organization_id="org"),
    ),
    ({"API_KEY": KEY, "JWT_TOKEN": TOKEN, "ORGANIZATION_ID": "org"}, Credentials(DEFAULT_API_URL, api_key=KEY)),
], ids=["key", "all", "token", "both"])  # fmt: skip
def test_credentials_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], expected: Credentials
) -> None:
    set_all(monkeypatch, **values)
    assert Credentials.from_environment() == expected


def test_env_files_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("hostile")
    (directory / ".env").write_text(f"DAYTONA_API_KEY={KEY}\n")
    monkeypatch.chdir(directory)
    with pytest.raises(PreflightError, match="the environment has none"):
        Credentials.from_environment()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "Set DAYTONA_API_KEY to a key"),
        ({"API_KEY": "  "}, "Set DAYTONA_API_KEY to a key"),
        ({"JWT_TOKEN": TOKEN}, "DAYTONA_JWT_TOKEN is set without DAYTONA_ORGANIZATION_ID"),
        ({"API_KEY": "opensesame\r\nHost: x"}, "DAYTONA_API_KEY contains a space"),
        ({"API_KEY": KEY, "API_URL": "http://daytona.example.org/api"}, "would be sent unencrypted"),
        ({"API_KEY": KEY, "API_URL": "http://localhost.example.org"}, "would be sent unencrypted"),
        ({"API_KEY": KEY, "API_URL": "https://x:opensesame@example.org"}, "has a user, a query or a fragment"),
        ({"API_KEY": KEY, "API_URL": "https://example.org?k=opensesame"}, "has a user, a query or a fragment"),
        ({"API_KEY": KEY, "API_URL": "https://example.org#opensesame"}, "has a user, a query or a fragment"),
        ({"API_KEY": KEY, "API_URL": "https://daytona.example.org\\@evil.org"}, "DAYTONA_API_URL contains a space"),
        ({"API_KEY": KEY, "API_URL": "https://"}, "Expected DAYTONA_API_URL to be an address like https://app."),
        ({"API_KEY": KEY, "API_URL": "ftp://daytona.example.org"}, "Expected DAYTONA_API_URL to be an address"),
        ({"API_KEY": KEY, "API_URL": "https://daytona.example.org:x/"}, "DAYTONA_API_URL is not an address"),
    ],
)
def test_invalid_credentials_are_rejected_without_secrets(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], complaint: str
) -> None:
    set_all(monkeypatch, **values)
    with pytest.raises(PreflightError) as caught:
        Credentials.from_environment()
    message = str(caught.value)
    assert complaint in message
    assert not any(secret in message for secret in (KEY, TOKEN, "opensesame"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:3000/api", "http://localhost:3000/api", "http://[::1]:3000/api"])
def test_local_service_needs_no_tls(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    set_all(monkeypatch, API_KEY=KEY, API_URL=url)
    assert Credentials.from_environment().api_url == url


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, API_KEY=f"{KEY}-shown")
    with_key = Credentials.from_environment()
    set_all(monkeypatch, API_KEY="", JWT_TOKEN=f"{TOKEN}-shown", ORGANIZATION_ID="org")
    with_token = Credentials.from_environment()
    assert "shown" not in f"{with_key!r} {with_key} {with_token!r} {with_token}"
    monkeypatch.delenv("DAYTONA_JWT_TOKEN")
    assert mask_known_secrets(f"{with_key.api_key} {with_token.jwt_token}") == "*** ***"


def test_has_credentials_ignores_blank_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_credentials()
    set_all(monkeypatch, API_KEY=" ")
    assert not has_credentials()
    set_all(monkeypatch, JWT_TOKEN=TOKEN)
    assert has_credentials()
