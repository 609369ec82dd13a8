from __future__ import annotations

import pytest

from ares_exp.commands.cli.flags import explain_flags


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--attempts", "3"], "There is no flag `--attempts`. It is `attempts=3` here."),
        (["--attempts=3", "seed=1"], "It is `attempts=3` here."),
        (["-n", "4"], "There is no flag `-n`. It is `concurrency=4` here."),
        (["--agent-timeout-multiplier=2"], "It is `timeouts.agent_multiplier=2` here."),
        (["--verify-on-truncation"], "It is `verify_on_truncation=…` here."),
        (["--model", "gpt"], "It is `policy=openai policy.model=gpt` here."),
        (["--resume", "run"], "It is `resume=run` here."),
        (["--concurency", "3"], "Did you mean `concurrency=3`?"),
        (["--resum", "seed=1"], "Did you mean `resume=…`?"),
        (["--zzz"], "There is no flag `--zzz`. To set a key, write `key=value`"),
    ],
)
def test_a_flag_that_is_none_is_answered_with_the_override(argv: list[str], expected: str) -> None:
    said = explain_flags(argv)
    assert said is not None
    assert expected in said


@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "seed=1,2"],
        ["--cfg", "job", "--resolve", "-p", "env"],
        ["--conf=x", "--multirun"],
        ["-cd", "x", "--config-dir=y"],
        ["x=-1", "~tracker"],
        ["-sc", "query=bash"],
    ],
)
def test_hydras_own_flags_are_left_to_it(argv: list[str]) -> None:
    assert explain_flags(argv) is None
