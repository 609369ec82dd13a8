"""`ares-exp compare EPISODE EPISODE`: the first difference, and what does not count."""

import contextlib
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from ares_exp.commands.cli.main import run_word
from ares_exp.containers.activity import CommandRecord
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.divergence import find_divergence, step_marks
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.request_diff import Difference, first_difference
from tests.examples import examples
from tests.unit.trajectories.chats import chat, said, with_step, write
from tests.unit.trajectories.strategies import trajectories

main = partial(run_word, program="ares-exp")


def diff(tmp_path: Path, old: EpisodeTrajectory, new: EpisodeTrajectory, *more: str) -> tuple[int, str]:
    paths = write(tmp_path / "a.json", old), write(tmp_path / "b.json", new)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["compare", *map(str, paths), *more])
    return code, out.getvalue()


def action(number: int, **changes: Any) -> dict[str, Any]:
    return {**(chat().steps[number].action or {}), **changes}


def observation(number: int, **changes: Any) -> dict[str, Any]:
    return {**(chat().steps[number].observation or {}), **changes}


DIFFERENT = [
    (1, {"action": action(1, data=[{"content": "I do not."}])}, "reply", "I do 1.", "I do not."),
    (1, {"action": action(1, finish_reason="length")}, "reply", None, None),
    (2, {"commands": [CommandRecord("run 2", 1, 0.5)]}, "command 0", "run 2\n[exit 0]", "run 2\n[exit 1]"),
    (2, {"commands": ()}, "command 0", "run 2\n[exit 0]", None),
    (2, {"reward": 0.5}, "reward", "0.0", "0.5"),
    (2, {"reward": None}, "reward", "0.0", "None"),
    (3, {"discount": 1.0}, "discount", "0.0", "1.0"),
    (3, {"step_type": "MID"}, "step_type", "LAST", "MID"),
    (1, {"observation": observation(1, temperature=0.5)}, "`temperature`", None, "0.5"),
    (0, {"observation": observation(0, messages=[said("user", "x")])}, "message 0 (user)", "Please do fix-bug.", "x"),
    (0, {"observation": {"picture": [1]}}, "observation", None, None),
]


@pytest.mark.parametrize(("number", "changes", "where", "old", "new"), DIFFERENT)
def test_first_difference_is_found(
    number: int, changes: dict[str, Any], where: str, old: str | None, new: str | None
) -> None:
    later = with_step(chat(), 3, reward=0.25)  # is not the first one
    changed = with_step(later if number < 3 else chat(), number, **changes)
    divergence = find_divergence(chat(), changed)
    assert divergence is not None
    marks = zip(step_marks(chat()), step_marks(changed), strict=True)
    assert [was == has for was, has in marks].index(False) == number
    assert (divergence.step, divergence.difference.where) == (number, where)
    if old or new:
        assert divergence.difference == Difference(where, old, new)
    assert divergence.difference.old != divergence.difference.new


NO_DIFFERENCE: list[dict[str, Any]] = [
    {"timestamp": 5.0},
    {"policy_sec": 1.0, "environment_sec": 2.0, "container_sec": 3.0},
    {"commands": [CommandRecord("run 1", 0, 99.0)]},
    {"action": action(1, cost=9.0, usage={"prompt_tokens": 1, "generated_tokens": 1}, model="other", latency_sec=3.0)},
    {"action": action(1, prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-0.5], sampling={"seed": 1})},
    {"action": action(1, data=[{"thinking": "hm"}, {"content": "I do 1."}])},
]


@pytest.mark.parametrize("changes", NO_DIFFERENCE)
def test_measured_values_are_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = replace(with_step(chat("b2", start=77.0), 1, **changes), metadata={"seed": 8})
    code, text = diff(tmp_path, chat(), other)
    assert code == 0
    assert "equal: all 4 time steps" in text


def calling(call_id: str, answered: str) -> EpisodeTrajectory:
    call = {"id": call_id, "type": "function", "function": {"name": "run", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": answered, "content": "ok"},
    ]
    episode = with_step(chat(), 1, action=action(1, data=[{"id": call_id, "name": "run", "arguments": "{}"}]))
    return with_step(episode, 1, observation={"messages": messages})


def test_tool_call_ids_are_compared_by_reference() -> None:
    assert find_divergence(calling("x1", "x1"), calling("y7", "y7")) is None
    divergence = find_divergence(calling("x1", "x1"), calling("y7", "z9"))
    assert divergence.difference.where == "message 1 (tool)"


@pytest.mark.parametrize(
    ("changes", "where", "old", "new"),
    [
        ({"task_name": "x"}, "task", "fix-bug", "x"),
        ({"outcome": Outcome.CLOSED}, "outcome", "completed", "closed"),
        ({"total_reward": None}, "total reward", "1.0", "None"),
        ({"error": ErrorInfo("Odd", "")}, "error", "None", "Odd"),
    ],
)
def test_different_end_is_a_difference(changes: dict[str, Any], where: str, old: str, new: str) -> None:
    divergence = find_divergence(chat(), replace(chat(), **changes))
    assert (divergence.step, divergence.difference) == (4, Difference(where, old, new))


@examples(15)
@given(trajectories(), trajectories())
def test_divergence_is_symmetric(one: EpisodeTrajectory, other: EpisodeTrajectory) -> None:
    assert find_divergence(one, one) is None
    there, back = find_divergence(one, other), find_divergence(other, one)
    assert (there is None) == (back is None)
    if there is not None and back is not None:
        assert there.step == back.step <= min(one.num_steps, other.num_steps)
        assert there.difference.where.split(" (")[0] == back.difference.where.split(" (")[0]
        assert (there.difference.old, there.difference.new) == (back.difference.new, back.difference.old)


def test_report_shows_difference_and_totals(tmp_path: Path) -> None:
    other = with_step(chat("b2", length=6), 2, commands=(CommandRecord("run 2\nquickly", 0, 0.5),))
    code, text = diff(tmp_path, chat(), other)
    assert code == 1
    assert "2 time steps in common; then: command 0\n  @@ -1,2 +1,3 @@\n   run 2\n  +quickly\n   [exit 0]\n" in text
    assert "A continues for 2 time steps\n\nstep 2  MID" in text
    assert "B continues for 4 time steps\n\nstep 2  MID" in text
    assert "step 3  LAST" in text
    assert "step 4" not in text
    totals = [line.split() for line in text.splitlines()[-15:]]
    assert ["reward", "1", "1"] in totals
    assert ["steps", "3", "5"] in totals
    assert ["prompt", "tokens", "300", "500"] in totals
    assert ["cost,", "US", "dollars", "0.75", "1.25"] in totals
    assert ["policy", "seconds", "–", "–"] in totals


def test_option_after_limits_the_shown_steps(tmp_path: Path) -> None:
    other = with_step(chat("b2"), 1, reward=0.75)
    assert "goes on" not in diff(tmp_path, chat(), other, "--after", "0")[1]
    assert diff(tmp_path, chat(), other, "--after", "9")[1].count("step 3  LAST") == 2


def test_longer_episode_is_a_difference(tmp_path: Path) -> None:
    whole = replace(chat(length=4), outcome=Outcome.COMPLETED)
    code, text = diff(tmp_path, replace(whole, steps=whole.steps[:2], num_steps=2), whole)
    assert code == 1
    assert (
        "2 time steps in common; then: number of time steps\n  @@ -1 +1 @@\n  -2 time steps\n  +4 time steps\n" in text
    )
    assert "A goes on" not in text
    assert "B continues for 2 time steps" in text


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    code, text = diff(
        tmp_path, chat("\x1b[1m"), with_step(chat("x", "\x1b[2m"), 1, action=action(1, data=[{"content": "\x1b]"}]))
    )
    assert code == 1
    assert "\x1b" not in text
    assert "\\x1b" in text


def test_several_episodes_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run" / "trajectories.jsonl", chat("a1"), chat("b2", start=2000.0))
    assert main(["compare", str(path), str(path)]) == 2
    assert f"found 2 in {path}. Name one, such as {path}/a1." in capsys.readouterr().err
    both = write(tmp_path / "both" / "trajectories.jsonl", chat("a__0"), chat("a__1")).parent / "a"
    assert main(["compare", str(both), str(both)]) == 2
    assert f"found 2 in {both}. Name one, such as {both}__0." in capsys.readouterr().err
    for wrong in ([str(path / "a")], [str(path / "a"), str(tmp_path / "run")], [str(path / "a")] * 3):
        assert main(["compare", *wrong]) == 2
        assert "Expected two or more runs, one sweep, or two episodes" in capsys.readouterr().err
    assert main(["compare", str(path / "a"), str(path / "b"), "--json"]) == 2
    assert "`--json` is not supported for two episodes" in capsys.readouterr().err
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["compare", str(tmp_path / "run" / "a"), str(path / "b")]) == 0


def test_retried_attempt_selects_its_last_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = chat("a__0__ff", "lost", length=1), chat("a__0__bb", start=2000.0)
    both = write(tmp_path / "run" / "trajectories.jsonl", *reversed(chats)).parent / "a"
    assert main(["compare", str(both), str(both)]) == 0
    assert "a__0__bb" in capsys.readouterr().out


def test_equal_texts_are_compared_by_other_fields() -> None:
    old = {"messages": [{"role": "user", "content": "x"}]}
    new = {"messages": [{"role": "user", "content": "x", "name": "bob"}]}
    difference = first_difference(old, new)
    assert "bob" in str(difference.new)
    assert "bob" not in str(difference.old)
    assert first_difference(old, {"messages": ()}) == Difference("message 0 (user)", str(old["messages"][0]), None)
    assert first_difference({}, old) == Difference("message 0 (user)", None, str(old["messages"][0]))
    assert first_difference(old, old) is None
