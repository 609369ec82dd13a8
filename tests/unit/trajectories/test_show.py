"""`ares-exp show`: what a person sees, and what a terminal must never get."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from ares_exp.commands.cli.main import run_word
from ares_exp.commands.show import LEFT_OUT_WHERE_NARROW, list_columns
from ares_exp.containers.activity import CommandRecord
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.terminal_text import collapsed, columns_that_fit, one_line, printable
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request
from ares_exp.trajectories.request_diff import request_change
from ares_exp.trajectories.stored_episodes import load
from tests.examples import examples
from tests.unit.trajectories.chats import chat, said, with_response, with_step, write
from tests.unit.trajectories.strategies import trajectories

main = partial(run_word, program="ares-exp")


def shown(*arguments: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["show", *map(str, arguments)]) == 0
    return out.getvalue()


def asking(number: int, *messages: dict[str, str], **settings: object) -> StepRecord:
    request = serialize_llm_request(LLMRequest(list(messages), **settings))  # type: ignore[arg-type]
    return replace(chat().steps[min(number, 2)], step_index=number, observation=request)


def test_complete_episode_is_shown(tmp_path: Path) -> None:
    episode = chat(temperature=0.5)
    path = write(tmp_path / "e.json", episode)
    assert shown(path).splitlines() == [
        "Episode a1",
        "  fix-bug  completed  reward 1",
        "  3 steps · 3 commands · 1970-01-01 00:16:40 UTC · 4.0 s · 300 + 30 tokens · $0.75",
        '  seed=7  agent={"name": "shell"}',
        f"  {path}",
        "",
        "step 0  FIRST",
        "  temperature 0.5",
        "  + user  (18 characters)",
        "    Please do fix-bug.",
        "",
        "step 1  MID  reward 0  discount 1",
        "  reply  100 + 10 tokens · $0.25",
        "    model tiny",
        "    I do 1.",
        "  $ run 1",
        "    exit 0  0.5 s",
        "  + assistant  (the reply)",
        "  + user  (6 characters)",
        "    done 1",
        "",
        "step 2  MID  reward 0  discount 1",
        "  reply  100 + 10 tokens · $0.25",
        "    I do 2.",
        "  $ run 2",
        "    exit 0  0.5 s",
        "  + assistant  (the reply)",
        "  + user  (6 characters)",
        "    done 2",
        "",
        "step 3  LAST  reward 1  discount 0",
        "  reply  100 + 10 tokens · $0.25",
        "    I do 3.",
        "  $ run 3",
        "    exit 0  0.5 s",
        "",
        "reward 1",
    ]


@pytest.mark.parametrize("name", ["trajectories/a1.json", "trajectories.jsonl"])
def test_show_ends_with_output_of_verifier(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, chat("a1", reward=0.0))
    (tmp_path / "files" / "a1" / "verifier").mkdir(parents=True)
    (tmp_path / "files" / "a1" / "verifier" / "test-stdout.txt").write_text("expected 12, found oops\x1b\n")
    end = "\nreward 0\n  verifier/test-stdout.txt\n    expected 12, found oops\\x1b\n"
    assert shown(tmp_path).endswith(end)
    assert shown(tmp_path, "--fold", "--step", "-1").endswith(end)
    assert "oops" not in shown(tmp_path, "--step", "1")
    listed = shown(tmp_path, "--failed")
    assert listed.splitlines()[3].endswith("   expected 12, found oops\\x1b ")
    assert listed.endswith("1 episode\n")
    assert shown(tmp_path, "--failed", "--fold").endswith(end)


@pytest.mark.parametrize(
    ("conditions", "ids"),
    [
        (["--failed"], ["b__0__x", "b__1__x"]),
        (["--outcome", "errored", "--outcome", "policy_error"], ["b__1__x"]),
        (["--task", "b*", "--list"], ["b__0__x", "b__1__x"]),
        (["--task", "a", "--failed"], []),
    ],
)
def test_show_lists_episodes_that_meet_conditions(tmp_path: Path, conditions: list[str], ids: list[str]) -> None:
    failed = [chat("b__0__x", "b", reward=0.5), chat("b__1__x", "b", reward=None, outcome=Outcome.POLICY_ERROR)]
    write(tmp_path / "trajectories.jsonl", chat("a__0__x", "a"), *failed)
    text = shown(tmp_path, "--list", *conditions)
    assert re.findall(r"^ (\S+__x)", text, re.MULTILINE) == ids
    assert text.endswith(f"{len(ids)} of 3 episodes\n")


@pytest.mark.parametrize(
    ("rewards", "listed"),
    [
        ({"reward": 1.0}, ""),
        ({"reward": 1.0, "sorted": 0.85, "judge": 0.9}, " (reward 1, sorted 0.85, judge 0.9)"),
        ({"tests": 1.0}, " (tests 1)"),
    ],
)
def test_named_rewards_are_listed(tmp_path: Path, rewards: dict[str, float], listed: str) -> None:
    text = shown(write(tmp_path / "e.json", replace(chat(), rewards=rewards)))
    assert text.splitlines()[1] == f"  fix-bug  completed  reward 1{listed}"


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--step", "0"], [0]),
        (["--step", "-1"], [3]),
        (["--steps", "1:3"], [1, 2]),
        (["--steps", "2:"], [2, 3]),
        (["--steps=-2:"], [2, 3]),
        (["--steps", ":1"], [0]),
        ([], [0, 1, 2, 3]),
    ],
)
def test_selected_steps_are_shown(tmp_path: Path, arguments: list[str], steps: list[int]) -> None:
    text = shown(write(tmp_path / "e.json", chat()), *arguments)
    assert [int(number) for number in re.findall(r"^step (\d+)", text, re.MULTILINE)] == steps


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episode=trajectories(), full=st.booleans())
def test_any_episode_is_shown_without_control_characters(
    tmp_path: Path, episode: EpisodeTrajectory, full: bool
) -> None:
    text = shown(write(tmp_path / "e.json", episode), *(["--full"] if full else []))
    obeyed = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert obeyed <= set("\n\t\u200c\u200d")
    text.encode()
    assert all(len(line) <= 120 for line in text.splitlines())


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08[bold]x[/bold]\u202e\u2028\ud800:smile:"


def test_attacks_in_every_field_are_escaped(tmp_path: Path) -> None:
    episode = replace(
        chat(ATTACK, ATTACK, outcome=Outcome.ERRORED, system_prompt=ATTACK, stop_sequences=[ATTACK]),
        error=ErrorInfo(ATTACK, ATTACK),
        metadata={ATTACK: ATTACK, "nested": {ATTACK: [ATTACK]}},
    )
    action = {"data": [{"content": ATTACK}, {"id": ATTACK, "name": ATTACK, "arguments": ATTACK}], "model": ATTACK,
              "finish_reason": ATTACK, "sampling": {ATTACK: ATTACK}}  # fmt: skip
    message = {"role": ATTACK, "content": ATTACK, ATTACK: ATTACK}
    episode = with_step(
        episode, 1, action=action, commands=(CommandRecord(ATTACK, 3, 1.0),), observation={"messages": [message]}
    )
    path = write(tmp_path / "e.json", with_step(episode, 2, observation={ATTACK: ATTACK}))
    for text in (shown(path), shown(path, "--full"), shown(path, "--list")):
        assert not set("\x1b\x07\x9b\r\x08\u202e\u2028\ud800") & set(text)
        assert "[bold]x[/bold]" in text.replace("\n", "").replace(" ", "")
        assert "\\x1b" in text


@given(st.text(max_size=50))
@example(ATTACK)
@example("a\u200db\u200cc")
def test_printable_text_is_unchanged(text: str) -> None:
    result = printable(text)
    assert printable(result) == result
    if all(char.isprintable() or char in "\n\t" for char in text):
        assert result == text


def test_long_texts_are_collapsed_in_the_middle() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    lines = collapsed(text)
    assert lines[:12] == [f"line {number}" for number in range(12)]
    assert lines[12] == "[… 84 lines, 672 characters …]"
    assert lines[13:] == [f"line {number}" for number in range(96, 100)]
    assert collapsed(text, full=True) == text.split("\n")
    [line] = collapsed("x" * 1000)
    assert line == "x" * 400 + " [… 500 characters …] " + "x" * 100
    assert collapsed("x" * 1000, full=True) == ["x" * 1000]
    assert one_line("a\nb " + "c" * 200, 10) == "a b ccccc…"


def test_rewritten_history_is_shown(tmp_path: Path) -> None:
    first, gone, kept = said("user", "the task"), said("user", "old output"), said("user", "kept")
    summary = said("user", "[shortened]")
    steps = [
        asking(0, first, gone, kept),
        asking(1, first, summary, kept),
        asking(2, first, gone, kept, said("user", "x")),
    ]
    path = write(tmp_path / "e.json", replace(chat(length=3), steps=tuple(steps)))
    text = shown(path, "--steps", "1:3")
    assert (
        "  history rewritten after message 0: 1 removed, 1 added\n"
        "  - user  (10 characters)\n    old output\n"
        "  + user  (11 characters)\n    [shortened]\n"
        "    1 messages stay\n"
    ) in text
    assert "  continues the conversation of step 0\n  + user  (1 characters)\n    x\n" in text


def test_settings_are_shown_when_they_change(tmp_path: Path) -> None:
    steps = [asking(0, temperature=0.5, top_p=0.9), asking(1, temperature=0.7), asking(2, temperature=0.7)]
    text = shown(write(tmp_path / "e.json", replace(chat(length=3), steps=tuple(steps))))
    assert text.count("temperature") == 2
    assert "  temperature 0.5 -> 0.7\n  top_p no longer set\n" in text


def test_reasoning_is_shown_before_the_reply(tmp_path: Path) -> None:
    thoughts = [ThinkingData("First\nI look."), ThinkingData("Zm8=", redacted=True)]
    response = LLMResponse([*thoughts, TextData("I do 1.")], usage=Usage(100, 10, reasoning_tokens=7), model="tiny")
    text = shown(write(tmp_path / "e.json", with_response(chat(), response)))
    expected = [
        *("  reply  100 + 10 tokens (7 of reasoning)", "    model tiny", "    thinking  (13 characters)"),
        *("      First", "      I look.", "    thinking  (11 characters)", "      (encrypted)", "    I do 1."),
        "  $ run 1",
    ]
    assert "\n".join(expected) in text
    assert " · 300 + 30 tokens (7 of reasoning) · " in text
    assert text.count("(the reply)") == 2, "a message with its text is the reply all the same"


def test_model_and_sampling_are_shown_once(tmp_path: Path) -> None:
    episode = chat(length=4)
    for number, model in enumerate(["tiny", "tiny", "large"], 1):
        action = {**(episode.steps[number].action or {}), "model": model, "sampling": {"temperature": 1.0}}
        episode = with_step(episode, number, action=action)
    text = shown(write(tmp_path / "e.json", episode))
    assert [text.count(part) for part in ("model tiny", "model large", 'sampling {"temperature": 1.0}')] == [1, 1, 1]


@examples(16)
@given(trajectories())
def test_shown_changes_reconstruct_each_request(episode: EpisodeTrajectory) -> None:
    for number, step in enumerate(episode.steps):
        messages = (step.observation or {}).get("messages")
        if not isinstance(messages, tuple) or not all(isinstance(message, dict) for message in messages):
            continue
        change = request_change(episode.steps, number)
        base = (episode.steps[change.base].observation or {})["messages"] if change.base is not None else ()
        assert [*base[: change.kept], *(m for sign, m in change.edits if sign != "-")] == list(messages)
        assert [*base[: change.kept], *(m for sign, m in change.edits if sign != "+")] == list(base)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (CommandRecord("ls", 2, 0.25), "exit 2  0.25 s"),
        (CommandRecord("ls", None, 12.0, timed_out=True), "timed out  12.0 s"),
        (CommandRecord("ls", None, 120.0), "killed  120 s"),
    ],
)
def test_end_of_commands_is_shown(tmp_path: Path, command: CommandRecord, told: str) -> None:
    assert f"  $ ls\n    {told}\n" in shown(write(tmp_path / "e.json", with_step(chat(), 1, commands=(command,))))


def test_episodes_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "trajectories" / "a1.json", chat("a1"))
    write(tmp_path / "trajectories" / "b2.json", chat("b2", reward=None, outcome=Outcome.POLICY_ERROR, start=2000.0))
    (tmp_path / "trajectories" / "c3.json").write_text("".join(list(dump_episode(chat("c3")))[:3]))
    rows = [line.split() for line in shown(tmp_path).splitlines() if line.startswith(" ")]
    cells = [row for row in rows if row and row[0] in ("a1", "b2", "c3")]
    assert [row[:5] for row in cells] == [
        ["a1", "fix-bug", "completed", "1", "3"],
        ["c3", "fix-bug", "lost", "–", "1"],
        ["b2", "fix-bug", "policy_error", "–", "3"],
    ]
    alone = shown(write(tmp_path / "x" / "a1.json", chat()), "--list")
    assert "a1" in alone
    assert alone.endswith("\n1 episode\n")


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (120, ["episode", "task", "outcome", "reward", "steps", "seconds", "started"]),
        (80, ["episode", "task", "outcome", "reward", "steps", "seconds"]),
        (30, ["episode", "outcome", "reward"]),
        (10, ["episode", "outcome", "reward"]),
    ],
)
def test_narrow_list_omits_columns(tmp_path: Path, width: int, columns: list[str]) -> None:
    write(tmp_path / "e.json", chat("fix-bug__0__12345678"))
    fitting = columns_that_fit(list_columns(load(tmp_path)), width, leave_out=LEFT_OUT_WHERE_NARROW)
    assert [*fitting] == columns


def test_id_prefix_selects_the_exact_or_all_episodes(tmp_path: Path) -> None:
    write(tmp_path / "trajectories.jsonl", chat("a"), chat("ab"), chat("abc"))
    assert shown(tmp_path / "a").startswith("Episode a\n")
    assert shown(tmp_path / "ab").startswith("Episode ab\n")
    assert "3 episodes" in shown(tmp_path)
    write(tmp_path / "trajectories.jsonl", *(chat(f"fix__{number}__3f2a") for number in (1, 10, 11)))
    assert shown(tmp_path / "fix__1").startswith("Episode fix__1__3f2a\n")
    assert "3 episodes" in shown(tmp_path / "fix")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gone"], r"gone: No such file"),
        (["run/gone"], r"gone.*none of the .* has an id that starts with 'gone'"),
        (["no/such/place"], "No such file"),
        (
            ["run", "--step", "1"],
            "`--step` and `--steps` require one episode, but found 2 in run. Name one, such as run/a1\\.",
        ),
        (["run/a1", "--step", "4"], "has no step 4, because it has only 4 steps"),
        (["run/a1", "--step", "-5"], "has no step -5, because it has only 4 steps"),
        (["run/a1", "--steps", "50:60"], "`--steps` selects no steps. The episode has the steps 0 to 3"),
        (["broken.json"], "broken.json at byte 0"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run" / "trajectories.jsonl", chat("a1"), chat("b2"))
    (tmp_path / "broken.json").write_text("{ no trajectory\n")
    assert main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(f"error: .*{expected}", captured.err)
    assert captured.err.count("\n") == 1


def test_broken_files_are_listed_below_the_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "trajectories" / "a1.json", chat("a1"))
    (tmp_path / "trajectories" / "b2.json").write_text("{ no trajectory\n")
    assert main(["show", str(tmp_path), "--list"]) == 0
    captured = capsys.readouterr()
    assert "1 episode\n" in captured.out
    assert captured.err.startswith("left out: ")
    assert "b2.json" in captured.err


def test_folded_steps_and_commands_have_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(write(tmp_path / "a.json", chat(length=3))), "--fold"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-7:-2] == [
        "0 FIRST", "1 I do 1.", "$ run 1  exit 0", "2 reward 1 I do 2.", "$ run 2  exit 0",
    ]  # fmt: skip


@pytest.mark.parametrize(("pager", "seen"), [("head -n 1", False), ("", True)])
def test_terminal_gets_colours_and_the_chosen_pager(tmp_path: Path, pager: str, seen: bool) -> None:
    path = write(tmp_path / "a.json", chat(length=60))
    master, slave = pty.openpty()
    environment = {**os.environ, "PAGER": pager, "TERM": "xterm", "COLUMNS": "90"}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", "ares_exp", "show", str(path)]
    shown = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    text = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the last process has left it
        while data := os.read(master, 65536):
            text += data
    os.close(master)
    assert shown.wait(60) == 0
    assert b"Episode a1" in text
    assert b"\x1b[" in text
    assert (b"run 59" in text) is seen
