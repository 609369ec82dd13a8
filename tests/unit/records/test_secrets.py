"""What is taken for a secret, and that it goes nowhere."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from ares_exp.records.secrets import (
    KnownSecrets,
    RepeatedWarnings,
    SecretFilter,
    is_sensitive,
    mask_known_secrets,
    protect,
    scrub,
    scrub_argv,
)

SECRETS = """
    api_key API_KEY apiKey apikey OPENAI_API_KEY wandb-key access_key key api_keys secret SECRET_VALUE client_secrets
    token HF_TOKEN authToken auth_tokens bearer password PGPASSWORD db-password passwd credentials Authorization
    basic_auth set-cookie policy.api_key ++policy.headers.Authorization
"""
OTHERS = """
    api_key_env reward_key max_output_tokens prompt_tokens tokens tokenizer eos_token cost_per_token token_budget
    keyword monkey author authors credentials_file seed identity_token_file SSH_AUTH_SOCK auth_url secret_name sort_key
    public_key _ step_metric key_env passing env.reward_key
"""


@pytest.mark.parametrize("key", SECRETS.split())
def test_sensitive_names_are_recognized(key: str) -> None:
    assert is_sensitive(key)


@pytest.mark.parametrize("key", [*OTHERS.split(), ""])
def test_ordinary_names_are_not_sensitive(key: str) -> None:
    assert not is_sensitive(key)


def test_sensitive_values_are_masked_at_any_depth() -> None:
    config = {
        "policy": {"api_key": "hunter2", "api_key_env": "OPENAI_API_KEY", "headers": [{"Authorization": "Bearer x"}]},
        "credentials": {"user": "me", "retries": 3, "list": ["a", None]},
        "reward_key": "accuracy",
        "max_output_tokens": 512,
    }
    assert scrub(config) == {
        "policy": {"api_key": "***", "api_key_env": "OPENAI_API_KEY", "headers": [{"Authorization": "***"}]},
        "credentials": {"user": "***", "retries": 3, "list": ["***", None]},
        "reward_key": "accuracy",
        "max_output_tokens": 512,
    }


def test_harmless_values_of_sensitive_keys_are_kept() -> None:
    config = {"api_key": None, "auth": False, "token": 3, "password": "", "secret": "${OPENAI_API_KEY}"}
    assert scrub(config) == config
    assert scrub({"api_key": "${KEY:-default-secret}"}) == {"api_key": "***"}


def test_original_config_is_unchanged() -> None:
    config = {"a": {"api_key": "hunter2"}}
    scrub(config)
    assert config == {"a": {"api_key": "hunter2"}}


def test_secret_environment_values_are_masked_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    monkeypatch.setenv("MY_TOKEN", "short")
    monkeypatch.setenv("MY_PLACE", "an ordinary value")
    config = {"note": "use sk-0123456789, it is short", "place": "an ordinary value"}
    assert scrub(config) == {"note": "use ***, it is short", "place": "an ordinary value"}
    assert scrub_argv(["note=sk-0123456789"]) == ["note=***"]


def test_working_directory_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/me/experiments")
    assert scrub({"path": "/home/me/experiments/tasks"}) == {"path": "/home/me/experiments/tasks"}


def test_secrets_are_found_raw_and_json_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", 'sk-"é"-012345')
    monkeypatch.setenv("MY_PLACE", "an ordinary value")
    known = KnownSecrets()
    for data in ('x sk-"é"-012345 x'.encode(), json.dumps({"key": 'sk-"é"-012345'}).encode()):
        assert known.found_in(data)
    assert not known.found_in(b"an ordinary value, sk-, 012345")
    assert known.longest >= len('sk-"é"-012345'.encode())
    monkeypatch.setenv("MY_API_KEY", "")
    assert not KnownSecrets().found_in(b"")


def test_new_secret_is_masked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "was-0815-1 is-0815-22 typed-0815-333"
    monkeypatch.setenv("SOME_API_KEY", "was-0815-1")
    assert mask_known_secrets(line) == "*** is-0815-22 typed-0815-333"
    monkeypatch.setenv("SOME_API_KEY", "is-0815-22")
    assert mask_known_secrets(line) == "was-0815-1 *** typed-0815-333"
    protect(["typed-0815-333"])
    assert mask_known_secrets(line) == "was-0815-1 *** ***"
    monkeypatch.delenv("SOME_API_KEY")
    assert mask_known_secrets(line) == "was-0815-1 is-0815-22 ***"


def test_user_part_of_a_url_is_masked() -> None:
    assert scrub({"base_url": "https://me:pw@example.org/v1"}) == {"base_url": "https://***@example.org/v1"}
    assert scrub({"url": "https://example.org/@me", "mail": "me@example.org"}) == {
        "url": "https://example.org/@me",
        "mail": "me@example.org",
    }


def test_command_lines_are_masked() -> None:
    argv = ["ares_exp", "-m", "seed=1,2", "policy.api_key=hunter2", "+policy.headers={Authorization: Bearer x}"]
    argv += ["policy.api_key_env=KEY", "++policy.extra={'token':'x'}", "env.path=a=b", "policy.max_output_tokens=5"]
    assert scrub_argv(argv) == [
        *("ares_exp", "-m", "seed=1,2", "policy.api_key=***", "+policy.headers=***"),
        *("policy.api_key_env=KEY", "++policy.extra=***", "env.path=a=b", "policy.max_output_tokens=5"),
    ]


@pytest.fixture
def terminal() -> Iterator[tuple[logging.Logger, io.StringIO, RepeatedWarnings]]:
    logger, stream, repeated = logging.getLogger("test.repeated"), io.StringIO(), RepeatedWarnings()
    handler = logging.StreamHandler(stream)
    handler.addFilter(repeated)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, stream, repeated
    logger.removeHandler(handler)
    logger.propagate = True


def test_first_warning_is_shown_and_repetitions_counted(
    terminal: tuple[logging.Logger, io.StringIO, RepeatedWarnings],
) -> None:
    logger, stream, repeated = terminal
    for number in range(28):
        logger.warning("The artifact %s was not collected: %s", f"/a{number}", "gone")
        logger.warning("%s", f"Episode {number} waits")
        logger.warning("%s failed: no disk", "The tracker" if number else "Writing the row")
        logger.error("Broken: %s", number)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("Broken")] == [
        "The artifact /a0 was not collected: gone",
        "Episode 0 waits",
        "Writing the row failed: no disk",
        "The tracker failed: no disk",
    ]
    assert len([line for line in lines if line.startswith("Broken")]) == 28
    assert repeated.told() == [
        "27 more warnings like this in run.log: The artifact /a0 was not collected: gone",
        "27 more warnings like this in run.log: Episode 0 waits",
        "26 more warnings like this in run.log: The tracker failed: no disk",
    ]
    assert repeated.told() == []


def test_masked_warnings_count_as_repetitions(terminal: tuple[logging.Logger, io.StringIO, RepeatedWarnings]) -> None:
    logger, stream, repeated = terminal
    for handler in logger.handlers:
        handler.filters.insert(0, SecretFilter(["hidden"]))  # in a run, it comes first
    for number in range(28):
        logger.warning("The artifact %s was not collected: %s", f"/hidden{number}", "gone")
    assert stream.getvalue() == "The artifact /***0 was not collected: gone\n"
    assert repeated.told() == ["27 more warnings like this in run.log: The artifact /***0 was not collected: gone"]
