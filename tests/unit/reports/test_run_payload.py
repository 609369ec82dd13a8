"""The payload of a run and its episodes: numbers, states, conversations, files, and shared steps of two episodes."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.activity import BackgroundRequest
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from ares_exp.records.run_dir import json_text
from ares_exp.records.statistics.run_statistics import results_document
from ares_exp.reports.episode_payload import HEAD_BYTES, TAIL_BYTES, episode_files, episode_payload
from ares_exp.reports.page import in_html, policy, script, style
from ares_exp.reports.run_payload import ShownRun
from ares_exp.trajectories.divergence import step_marks
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import BackgroundRecord
from tests.unit.commands.recorded import row, run_of
from tests.unit.trajectories.chats import chat, with_response, with_step

ROWS = [row("a", 0, 1.0), row("a", 1, 0.0), row("b", 0, None)]


def test_missing_or_old_results_are_recomputed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ROWS)
    expected = results_document(ShownRun(run).summary)
    assert ShownRun(run).payload()["results"] == expected
    for tries, is_read in ((2, False), (3, True)):
        (run / "results.json").write_text(json.dumps({"totals": {"tries": tries}, "statistics": {}, "tasks": []}))
        assert (ShownRun(run).payload()["results"] == expected) is not is_read


@pytest.mark.parametrize(
    ("sessions", "planned", "name"),
    [
        ([{"started": 1.0, "hostname": socket.gethostname()}, {"ended": 2.0, "interrupted": False}], 3, "finished"),
        ([{"started": 1.0}, {"ended": 2.0, "interrupted": False}], 4, "incomplete"),
        ([{"started": 1.0}, {"ended": 2.0, "interrupted": True}], 4, "interrupted"),
        ([{"started": 1.0, "hostname": socket.gethostname()}], 4, "killed"),
        ([{"started": 1.0, "hostname": "another-machine"}], 4, "running"),
    ],
)
def test_state_follows_the_records(tmp_path: Path, sessions: list[dict[str, Any]], planned: int, name: str) -> None:
    run = run_of(tmp_path / "run", [*ROWS[:2], row("b", 0, 1.0)])
    (run / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sessions))
    (run / "summary.json").write_text(json.dumps({"planned": planned}))
    assert ShownRun(run).state.name == name
    assert (ShownRun(run).elapsed_sec is None) is (name != "running")


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/venv/bin/ares-exp", "env.tasks=[a,b]"], "ares-exp 'env.tasks=[a,b]'"),
        (["/src/ares_exp/__main__.py", "seed=3"], "ares-exp seed=3"),
        (["script.py"], "script.py"),
        (None, None),
    ],
)
def test_payload_has_facts_and_command_line(tmp_path: Path, argv: list[str] | None, shown: str | None) -> None:
    run = run_of(tmp_path / "run", ROWS)
    assert ShownRun(run).payload()["facts"] == ["attempts=1"]
    choices = {"tracker": "none", "policy": "openai", "env": "harbor"}
    (run / "provenance.json").write_text(json.dumps({"argv": argv, "choices": choices}))
    (run / "config.yaml").write_text("policy: {model: tiny}\nattempts: 1\nseed: 3\n")
    (run / "sessions.jsonl").write_text('{"attempts": 1}\n{"attempts": 2}\n')  # the second session raised them
    payload = ShownRun(run).payload()
    assert payload["facts"] == ["env=harbor", "policy=openai", "model=tiny", "attempts=2", "seed=3"]
    assert payload["argv"] == shown


def test_killed_run_shows_the_unfinished_episode(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ROWS)
    lines = [*dump_episode(chat("c-0", "c"))]
    (run / "trajectories" / "c-0.json").write_text("".join(lines[:-2]))
    shown = ShownRun(run)
    last = shown.payload()["episodes"][-1]
    assert (last["episode_id"], last["outcome"], last["num_steps"]) == ("c-0", "lost", 2)
    assert len(shown.episode("c-0")["steps"]) == 3


def test_reply_pieces_and_conversations_are_included(tmp_path: Path) -> None:
    pieces = [ThinkingData("hm"), TextData("I look."), ToolCallData("1", "bash", '{"command": "ls"}')]
    episode = with_response(chat(), LLMResponse(pieces, model="tiny"))
    asked = episode.steps[1].observation or {}
    episode = with_step(episode, 1, observation={**asked, "origin": {"wire": "messages", "conversation": "sub-agent"}})
    steps = episode_payload(episode)["steps"]
    assert [(one["kind"], one["text"]) for one in steps[1]["reply"]["pieces"]] == [
        ("reasoning", "hm"), ("text", "I look."), ("call", '{"command": "ls"}'),
    ]  # fmt: skip
    assert [step.get("conversation") for step in steps] == [None, "sub-agent", None, None]
    assert all("origin" not in name for step in steps for name, *_ in step.get("settings", ()))
    empty = with_step(episode, 0, observation={**(episode.steps[0].observation or {}), "sampling": {}})
    assert "settings" not in episode_payload(empty)["steps"][0]


def test_background_calls_belong_to_the_previous_step() -> None:
    request = LLMRequest([{"role": "user", "content": "A title?"}], origin=Origin("openai-chat", conversation="side-1"))
    background_request = BackgroundRecord.of(BackgroundRequest(request, LLMResponse.from_text("Bugs")))
    odd = BackgroundRecord({"messages": "no list"}, {"data": 3})
    shown, broken = episode_payload(with_step(chat(), 1, background_requests=(background_request, odd)))["steps"][1][
        "background_requests"
    ]
    assert (shown["conversation"], shown["asked"], shown["reply"]["pieces"]) == (
        "side-1", "A title?", [{"kind": "text", "text": "Bugs"}],
    )  # fmt: skip
    assert broken["asked"] == ""


def test_added_messages_are_included_once(tmp_path: Path) -> None:
    payload = episode_payload(chat(length=5))
    assert [message["text"] for message in payload["messages"] if message["role"] == "user"] == [
        "Please do fix-bug.", "done 1", "done 2", "done 3",
    ]  # fmt: skip
    assert [sign for sign, _ in payload["steps"][2]["edits"]] == ["=", "+"]


def test_step_marks_reveal_a_difference() -> None:
    other = with_step(chat(), 2, reward=0.5)
    marks = step_marks(chat()), step_marks(other)
    assert [[x == y for x, y in zip(*pair, strict=True)] for pair in zip(*marks, strict=True)][2] == [
        True, True, False, True,
    ]  # fmt: skip
    assert step_marks(replace(chat(), episode_id="other")) == marks[0]


def test_files_are_read_without_following_links(tmp_path: Path) -> None:
    folder = tmp_path / "files" / "a-0" / "verifier"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "files" / "b-0").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "out.txt").write_bytes(b"x" * HEAD_BYTES + b"y" * 1000 + b"z" * TAIL_BYTES)
    (folder.parent / "other.bin").write_bytes(b"12345")
    found = episode_files(tmp_path, "a-0")
    assert [(one["name"], one["size"]) for one in found] == [
        ("verifier/out.txt", HEAD_BYTES + 1000 + TAIL_BYTES), ("other.bin", 5),
    ]  # fmt: skip
    assert found[0]["left_out"] == 1000
    assert "y" not in found[0]["text"].replace("bytes", "")
    for name in ("b-0", "../a-0", "..", "", "nul\0", "half \ud800"):
        assert episode_files(tmp_path, name) == []


def test_json_in_html_cannot_close_the_script() -> None:
    text = in_html(json_text({"a": "</script><!--\u2028&", "b": float("nan")}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&", "b": None}


def test_security_policy_names_script_and_style_digests() -> None:
    told = policy()
    assert told.count("'sha256-") == 2
    assert "unsafe" not in told
    assert "default-src 'none'" in told
    assert len(script()) + len(style()) < 150_000  # a page is to stay small beside what it shows


@pytest.mark.parametrize(
    ("written", "about"),
    [
        ({}, []),
        ({"config.yaml": "branch_from: outputs/a/x@3\nreplay: null\n"}, ["branches of outputs/a/x@3"]),
        (
            {"replay.json": '{"recording": "outputs/a", "matching_steps": 3, "compared_steps": 4, "score": 0.75}'},
            ["replay of outputs/a", "3 of 4 steps match (0.75)"],
        ),
        ({"parts/0/config.yaml": "", "parts/1/config.yaml": ""}, ["merged from 2 runs"]),
    ],
)
def test_origin_of_a_run_is_described(tmp_path: Path, written: dict[str, str], about: list[str]) -> None:
    run = run_of(tmp_path / "run", ROWS)
    for name, text in written.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    assert ShownRun(run).payload()["about"] == about
