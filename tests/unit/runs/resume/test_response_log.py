"""The response log: the written responses are read again after any crash."""

import json
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError, StorageError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_dir import dump_json
from ares_exp.trajectories.recorded_responses import Exchange, responses
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.response_log import LoggedEpisode, logged_episodes
from tests.unit.runs.resume.logs import log_in

EPISODE = LoggedEpisode("fix__0__aa", "fix", attempt=0, retry=1, seed=7, started_at=3.5, parent="fix__0__bb")
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Repair it. \ud800 ✓\n"}]


def request(number: int) -> LLMRequest:
    """That of a turn, with the turns before it."""
    said = [{"role": role, "content": f"{role} {turn}"} for turn in range(number) for role in ("assistant", "user")]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    return LLMRequest([*MESSAGES, *said], system_prompt="You repair.", temperature=0.5, tools=tools)


RESPONSES = [
    LLMResponse.from_text("assistant 0"),
    LLMResponse(
        data=(TextData("Let me see."), ToolCallData("call-1", "bash", '{"command": "ls\u2028", "n": 1}')),
        cost=0.25,
        usage=Usage(prompt_tokens=30, generated_tokens=3),
        finish_reason="tool_calls",
        model="m-1",
        latency_sec=0.5,
        policy_version="3",
        activations={"layer": {"file": "activations/a.npy", "rows": 2}},
        prompt_token_ids=(1, 2, 3),
        completion_token_ids=(4, 5),
        logprobs=(-0.5, -0.25),
        sampling={"temperature": 0.5, "stop": ("a",)},
    ),
    LLMResponse.from_text("assistant 2"),
]


def exchanges(count: int) -> tuple[Exchange, ...]:
    return tuple(Exchange(serialize_llm_request(request(n)), RESPONSES[n]) for n in range(count))


def written(folder: Path, count: int, episode: LoggedEpisode = EPISODE) -> Path:
    log = log_in(folder, episode)
    log.start([])
    for number in range(count):
        log.append(request(number), RESPONSES[number])
    return folder / f"{episode.episode_id}.jsonl"


def plain(value: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(value))


def test_log_returns_the_written_responses(tmp_path: Path) -> None:
    [log] = logged_episodes(written(tmp_path / "responses", 3).parent)
    assert replace(log, exchanges=()) == EPISODE
    assert [one.response for one in log.exchanges] == RESPONSES
    assert [plain(one.request) for one in log.exchanges] == [plain(one.request) for one in exchanges(3)]


def test_unanswered_request_keeps_its_stage(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start(exchanges(1))
    log.append(request(1), None)
    log.append(request(0), RESPONSES[2], stage=1)
    [found] = logged_episodes(tmp_path)
    assert [(one.response, one.stage) for one in found.exchanges] == [(RESPONSES[0], 0), (None, 0), (RESPONSES[2], 1)]
    assert responses(found.exchanges) == [RESPONSES[0], RESPONSES[2]]


def test_prefetched_responses_are_read_in_order(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start(exchanges(1), exchanges(2)[1:])
    assert [log.append_ahead(request(n), RESPONSES[n], stage=1) for n in (2, 1)] == [1, 2]
    log.append(request(0), RESPONSES[0], stage=1)
    log.apply(2)
    [found] = logged_episodes(tmp_path)
    assert [(one.response, one.stage) for one in found.exchanges] == [
        (RESPONSES[0], 0),
        (RESPONSES[0], 1),
        (RESPONSES[1], 1),
    ]
    assert [(one.response, one.stage) for one in found.ahead] == [(RESPONSES[1], 0), (RESPONSES[2], 1)]
    assert (found.taken_over, found.ahead_taken_over) == (1, (RESPONSES[1],))
    log.apply(0)
    [found] = logged_episodes(tmp_path)
    assert (found.exchanges[-1].response, found.ahead_taken_over) == (RESPONSES[1], (RESPONSES[1],)), "paid for before"


@pytest.mark.parametrize(
    "line", [{"applied": 7}, {"applied": 0}, {"applied": None}, {"ahead": "1"}, {"ahead": 0, "action": None}], ids=str
)
def test_invalid_turn_ends_the_log(tmp_path: Path, line: dict[str, Any]) -> None:
    path = written(tmp_path, 2)
    lines = path.read_text().rstrip("\n").split("\n")
    last = json.loads(lines[-1]) if "ahead" in line else {}
    path.write_text("\n".join([*lines, json.dumps(last | line), *lines[1:]]) + "\n")
    assert [one.response for one in LoggedEpisode.read(path).exchanges] == RESPONSES[:2]


@pytest.mark.parametrize("version", [2, 4])
def test_log_of_another_version_is_rejected(tmp_path: Path, version: int) -> None:
    path = written(tmp_path, 2)
    path.write_text(path.read_text().replace('"schema_version": 3', f'"schema_version": {version}'))
    with pytest.raises(
        ConfigError, match=f"{path.name}: expected schema_version 3, got {version}. Resume the run with"
    ):
        logged_episodes(tmp_path)


RESULT = EpisodeResult("fix__0__aa", "fix", 0, 7, Outcome.TRUNCATED, 0.5, rewards={"lines": 3.0}, retry=1)


def test_result_ends_the_log(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start(exchanges(2))
    log.end(dump_json(RESULT.to_dict()))
    [found] = logged_episodes(tmp_path)
    assert (found.result, len(found.exchanges)) == (RESULT, 2)
    log.start(found.exchanges)
    assert logged_episodes(tmp_path)[0].result is None


@pytest.mark.parametrize(
    "other",
    [
        {"episode_id": "another"},
        {"task_name": "sum"},
        {"seed": 8},
        {"retry": 0},
        {"reward": 1e300},
        {"cost": -1e300},
        {"outcome": "lost"},
    ],
    ids=str,
)
def test_foreign_result_is_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    path = written(tmp_path, 1)
    with path.open("a") as file:
        file.write(json.dumps({"result": RESULT.to_dict() | other}) + "\n")
    [found] = logged_episodes(tmp_path)
    assert (found.result, len(found.exchanges)) == (None, 1)


@pytest.mark.parametrize("stage", [-1, 1.5, "1", None, True, 10**20])
def test_invalid_stage_ends_the_log(tmp_path: Path, stage: object) -> None:
    path = written(tmp_path, 2)
    *lines, last = path.read_text().rstrip("\n").split("\n")
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), "stage": stage})]) + "\n")
    assert len(LoggedEpisode.read(path).exchanges) == 1


def test_growing_requests_are_written_once(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 100_000}]
    log = log_in(tmp_path, EPISODE)
    log.start([])
    for number in range(10):
        log.append(LLMRequest([*long, *request(number).messages]), RESPONSES[0])
    path = tmp_path / f"{EPISODE.episode_id}.jsonl"
    assert path.stat().st_size < 150_000
    assert len(LoggedEpisode.read(path).exchanges) == 10


def test_restarted_log_replaces_the_earlier_log(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start(exchanges(3))
    log.start(exchanges(1))
    log.append(request(1), RESPONSES[2])
    [found] = logged_episodes(tmp_path)
    assert found.taken_over == 1
    assert [one.response for one in found.exchanges] == [RESPONSES[0], RESPONSES[2]]


def test_whole_lines_of_a_truncated_log_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    data = path.read_bytes()
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    near_ends = (end + step for end in ends[1:] for step in (-1, 0, 1))
    for cut in sorted({*range(ends[0], len(data), 7), *near_ends} - {len(data)}):
        path.write_bytes(data[:cut])
        found = LoggedEpisode.read(path).exchanges
        assert len(found) in {sum(cut > end for end in ends[1:]), sum(cut >= end for end in ends[1:])}
        assert [one.response for one in found] == RESPONSES[: len(found)]


@pytest.mark.parametrize(
    "text", ["", "\n", "{", "[]", "null", "{}", "[" * 100_000, '{"episode_id": 5}', "\xff\xfe", '{"retry": "0"}']
)
def test_log_without_a_first_line_is_kept(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    other = written(tmp_path, 1)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(text.encode("latin-1"))
    assert [one.episode_id for one in logged_episodes(tmp_path)] == [other.stem]
    assert broken.exists()
    assert "broken.jsonl cannot be read" in caplog.text


@pytest.mark.parametrize("line", ["null", "[1]", "{}", '{"observation": 5, "action": 5}', "[" * 100_000, "NaN"])
def test_lines_after_a_broken_line_are_ignored(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, 3)
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    assert [one.response for one in LoggedEpisode.read(path).exchanges] == RESPONSES[:1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("episode_id", "../../x"), ("retry", -1), ("started_at", float("nan")), ("seed", "7"), ("attempt", 1.5)],
)
def test_invalid_head_is_ignored(tmp_path: Path, name: str, value: object) -> None:
    path = written(tmp_path, 1)
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(head), name: value}) + "\n", *lines]))
    assert logged_episodes(tmp_path) == []


def test_discarded_log_is_not_written_again(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start([])
    log.discard()
    log.append(request(0), RESPONSES[0])
    log.discard()
    assert list(tmp_path.iterdir()) == []


def test_log_on_full_disk_takes_no_later_response(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    log = log_in(tmp_path, EPISODE)
    log.start(exchanges(1))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(StorageError, match=rf"cannot write {path}: (No space|File too large)"):
            log.append(request(1), RESPONSES[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(StorageError):
        log.append(request(2), RESPONSES[2])
    with pytest.raises(StorageError):
        log.check()
    assert path.read_bytes() == before, "one response is missing: no later one is of use"


def test_log_without_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "responses").write_text("no folder")
    log = log_in(tmp_path / "responses", EPISODE)
    with pytest.raises(StorageError):
        log.start(exchanges(1))


def test_deleted_log_is_noticed_before_request(tmp_path: Path) -> None:
    log = log_in(tmp_path, EPISODE)
    log.start([])
    log.check()
    (tmp_path / f"{EPISODE.episode_id}.jsonl").unlink()
    with pytest.raises(StorageError, match="No such file"):
        log.check()


@pytest.mark.parametrize("count", ["many", -1, 10**400], ids=["text", "negative", "endless"])
def test_responses_with_invalid_usage_are_ignored(tmp_path: Path, count: object) -> None:
    path = written(tmp_path, 2)
    head, first, second = path.read_text().rstrip("\n").split("\n")
    changed = json.loads(second)
    changed["action"]["usage"] = {"prompt_tokens": count, "generated_tokens": 1}
    path.write_text("\n".join((head, first, json.dumps(changed))) + "\n")
    assert len(LoggedEpisode.read(path).exchanges) == 1
