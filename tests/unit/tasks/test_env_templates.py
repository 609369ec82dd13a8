from __future__ import annotations

import pytest

from ares_exp.errors import TaskError
from ares_exp.tasks.env_templates import resolve, resolve_env, secret_values

HOST = {"A": "va", "E": "", "API_KEY": "sk-12345678", "MAX_TOKENS": "1234567890", "SHORT_KEY": "abc"}


@pytest.mark.parametrize(("value", "expected"), [("${M:-${A}}", "${A}"), ("${A}\n", "${A}\n")])
def test_resolved(value: str, expected: str) -> None:
    assert resolve(value, HOST) == expected


@pytest.mark.parametrize(("value", "name"), [("${M}", "M"), ("${ A }", " A "), ("${A-d}", "A-d")])
def test_a_missing_variable_is_named(value: str, name: str) -> None:
    with pytest.raises(TaskError, match=r"task\.toml: \[verifier\.env\] KEY: .*not\. Set it") as caught:
        resolve_env({"KEY": value}, where="task.toml: [verifier.env]", host=HOST)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("A-B", "x"), ("", "x"), ("1A", "x"), ("A", "x\0y")])
def test_what_cannot_be_a_variable_is_refused(key: str, value: str) -> None:
    with pytest.raises(TaskError, match="expected a variable name"):
        resolve_env({key: value}, where="here", host=HOST)


def test_the_host_is_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARES_EXP_TEST_VALUE", "seen")
    assert resolve_env({"X": "${ARES_EXP_TEST_VALUE}"}, where="here") == {"X": "seen"}


def test_secrets_are_host_values_with_a_telling_name() -> None:
    tables = [
        {"JUDGE": "${API_KEY}", "LIMIT": "${MAX_TOKENS}", "PLAIN": "${A}", "OTHER_KEY": "literal-value"},
        {"SECRET_THING": "${MAX_TOKENS}", "B": "${SHORT_KEY}"},
    ]
    assert secret_values(tables[:1], host=HOST) == ("sk-12345678",)
    assert secret_values(tables, host=HOST) == ("sk-12345678", "1234567890")
