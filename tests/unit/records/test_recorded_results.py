"""What a run recorded, read back: a torn end is expected, anything else that is broken is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.recorded_results import MAX_ROW_BYTES, read_results
from ares_exp.records.results import EnvironmentUsage, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.records.run_dir import append_lines

RESULT = EpisodeResult(
    "a-0",
    "a",
    0,
    7,
    Outcome.AGENT_ERROR,
    None,
    {"reward": 0.5},
    ErrorInfo("AgentError", "boom"),
    phase_sec={"agent": 1.5},
    retry=1,
    replayed=Replayed("a-00", 2),
    environment_usage=EnvironmentUsage(30, 15, 0.5),
)


def _row(**changes: Any) -> bytes:
    return json.dumps({**RESULT.to_dict(), **changes}).encode() + b"\n"


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.touch()
    assert read_results(path).results == ()
    append_lines(path, RESULT.to_dict())
    append_lines(path, {**RESULT.to_dict(), "attempt": 1})
    found = read_results(path)
    assert [one.attempt for one in found.results] == [0, 1]
    assert found.results[0] == RESULT
    assert (found.torn, found.whole_bytes) == (False, path.stat().st_size)


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    whole, last = _row(), _row(attempt=1)
    for length in range(1, len(last), 7):
        path.write_bytes(whole + last[:length])
        found = read_results(path)
        assert (found.results, found.torn, found.whole_bytes) == ((RESULT,), True, len(whole))
    path.write_bytes(whole + last[:-1])  # all but its end: it was not written whole
    assert read_results(path).results == (RESULT,)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{}\n", "episode_id"),
        (b"[]\n", "expected the result"),
        (b"{\n", "expected the result"),
        (b"\n", "expected the result"),
        (b"\x00\x00\xff\n", "expected the result"),
        (b"[" * 100_000 + b"\n", "expected the result"),
        (_row(reward=float("nan")), "NaN is no number"),
        (_row(reward=float("inf")), "Infinity is no number"),
        (_row().replace(b'"reward": null', b'"reward": 1e999'), "not finite"),
        (_row(cost=1e200), "not finite"),
        (_row(reward="1.0x"), "reward"),
        (_row(prompt_tokens=-1), "not between"),
        (_row(generated_tokens=2**60), "not between"),
        (_row(outcome="splendid"), "outcome"),
        (_row(environment_usage={"prompt_tokens": -1}), "not between"),
        (_row(environment_usage={"generated_tokens": 2**60}), "not between"),
        (_row(environment_usage={"cost": 1e200}), "not finite"),
        (_row(environment_usage="much"), "environment_usage"),
        (b'{"episode_id": "' + b"x" * MAX_ROW_BYTES + b'"}\n', "more than"),
    ],
    ids=range(19),
)
def test_a_broken_line_is_refused_by_its_number(line: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(_row() + line + _row(attempt=1))
    with pytest.raises(ConfigError, match=what) as caught:
        read_results(path)
    assert "line 2:" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(_row(colour="blue"))
    assert read_results(path).results == (RESULT,)


def test_no_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_results(tmp_path / "episodes.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_results(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "episodes.jsonl")
    with pytest.raises(ConfigError, match="regular file"):
        read_results(tmp_path / "episodes.jsonl")


@pytest.mark.parametrize("line", ['{"episode_id": "a-0", "rewards": {"x": 1e300}}', "[]", '{"episode_id": "a-0"}', "{"])
def test_added_scores_join_rows_or_name_their_line(line: str, tmp_path: Path) -> None:
    scores = tmp_path / "scores" / "judge.jsonl"
    append_lines(tmp_path / "episodes.jsonl", RESULT.to_dict())
    append_lines(scores, {"config": {}}, {"episode_id": "a-0", "rewards": {"judge": 0.25, "reward": 1.0}})
    [row] = read_results(tmp_path / "episodes.jsonl").results
    assert (row.reward, row.rewards) == (None, {"reward": 0.5, "judge": 0.25}), "the first value stays"
    with scores.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match=r"judge\.jsonl, line 3: expected the scores of an episode"):
        read_results(tmp_path / "episodes.jsonl")
