"""Functions that read the results and totals of a run from its files, which are untrusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from ares_exp.errors import ConfigError
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import refuse_constant
from ares_exp.records.results import EpisodeResult, RunSummary, final_results
from ares_exp.records.run_dir import SCORES_SUFFIX, RunDir, open_regular, read_json_object, read_record, read_yaml
from ares_exp.records.validation import MAX_COUNT, MAX_NUMBER

MAX_ROWS = 2_000_000
MAX_ROW_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class RecordedResults:
    """The content of `episodes.jsonl`.

    Attributes:
        results: Results of all episodes, including retried ones, in the order in which they ended.
        torn: Whether the last line is incomplete because of a crash. This line is not in `results`.
        whole_bytes: Total size of the complete lines in bytes.
    """

    results: tuple[EpisodeResult, ...]
    torn: bool
    whole_bytes: int


def read_results(path: Path) -> RecordedResults:
    """Reads `episodes.jsonl`. Also adds the scores that `ares-exp score` has computed later to the episodes' rewards.

    Raises:
        ConfigError: The file cannot be read, or a complete line is not a valid result. The message has the line number.
    """
    results: list[EpisodeResult] = []
    whole_bytes, torn = read_lines(
        path, "the result of an episode", lambda data: results.append(EpisodeResult.from_dict(data))
    )
    if added := added_rewards(RunDir(path.parent)):
        results = [replace(one, rewards=with_added(one.rewards, added.get(one.episode_id, {}))) for one in results]
    return RecordedResults(tuple(results), torn, whole_bytes)


def read_sessions(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Yields the lines of `sessions.jsonl`. Skips invalid lines, and yields nothing if the file cannot be read."""
    with suppress(OSError, ConfigError):
        for text in read_record(run_dir.sessions).splitlines():
            with suppress(ValueError, RecursionError):  # an incomplete line
                if isinstance(line := json.loads(text), dict):
                    yield line


def last_attempts(run_dir: RunDir) -> int | None:
    """Returns the setting `attempts` (number per task) from the last session that recorded it; `None` if none did."""
    planned = [line.get("attempts") for line in read_sessions(run_dir)]
    return next((one for one in reversed(planned) if isinstance(one, int) and one > 0), None)


def added_rewards(run_dir: RunDir) -> dict[str, dict[str, float]]:
    """Reads the scores that `ares-exp score` added to a finished run: episode id → name of the score → value.

    Raises:
        ConfigError: A file cannot be read, or a complete line is not a valid score. The message has the line number.
    """
    added: dict[str, dict[str, float]] = {}

    def take(line: Any) -> None:
        if "config" not in line:  # each call of `ares-exp score` starts with a line with its config
            numbers = {str(name): float(value) for name, value in line["rewards"].items()}
            if not all(abs(number) < MAX_NUMBER for number in numbers.values()):
                raise ValueError(f"a number is not finite or too large (limit: {MAX_NUMBER:g})")
            added.setdefault(str(line["episode_id"]), {}).update(numbers)

    for path in sorted(run_dir.scores.glob(f"*{SCORES_SUFFIX}")):
        read_lines(path, "the scores of an episode", take)
    return added


def with_added(rewards: Mapping[str, float], added: Mapping[str, float]) -> dict[str, float]:
    """Adds rewards that were computed later to the rewards of an episode. Existing rewards are not replaced."""
    return {**rewards, **added, **rewards}


def read_lines(path: Path, what: str, take: Callable[[Any], None]) -> tuple[int, bool]:
    """Calls `take` with the JSON value of each complete line of a file.

    Returns:
        The number of bytes of the complete lines, and whether an incomplete line follows them.

    Raises:
        ConfigError: The file cannot be read, or a line is invalid. The message contains `what`, which describes a line,
            such as `the scores of an episode`.
    """
    whole_bytes, number = 0, 0
    try:
        with open_regular(path) as lines:
            while line := lines.readline(MAX_ROW_BYTES + 1):
                number += 1
                if len(line) > MAX_ROW_BYTES or number > MAX_ROWS:
                    raise ValueError(
                        f"the line has more than {MAX_ROW_BYTES:,} bytes, or the file has more than {MAX_ROWS:,} lines"
                    )
                if not line.endswith(b"\n"):
                    return whole_bytes, True
                take(json.loads(line, parse_constant=refuse_constant))
                whole_bytes += len(line)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number}: cannot read {what}: {error}. Repair the line, or remove it to ignore its "
            "episode. Only an incomplete last line is ignored automatically."
        ) from None
    return whole_bytes, False


_COUNTS = tuple(field.name for field in fields(Usage))


def is_countable(response: LLMResponse) -> bool:
    """Returns whether the cost and token counts of an untrusted response are valid and can be added to totals."""
    counts = [getattr(response.usage, name) for name in _COUNTS]
    if {*map(type, counts)} != {int} or min(counts) < 0 or max(counts) >= MAX_COUNT:
        return False
    return isinstance(response.cost, int | float) and 0 <= response.cost < MAX_NUMBER


def recorded_summary(run_dir: RunDir) -> RunSummary | None:
    """Computes the totals of a run from its files, also while it is running. Returns `None` if no run was started.

    Raises:
        ConfigError: A file of the run is invalid.
    """
    if not run_dir.has_run or not run_dir.episodes.is_file():
        return None
    results = read_results(run_dir.episodes).results
    totals = read_object(run_dir.summary)
    planned = max(_planned(run_dir, totals), len(final_results(results)))
    wall_sec, threshold, ended_by = (totals.get(name) for name in ("wall_sec", "threshold", "ended_by"))
    return RunSummary(
        planned=planned,
        results=results,
        interrupted=totals.get("interrupted") is True,
        ended_by=ended_by if isinstance(ended_by, str) else None,
        wall_sec=float(wall_sec) if isinstance(wall_sec, int | float) else 0.0,
        threshold=float(threshold) if isinstance(threshold, int | float) else 1.0,
        must_pass=totals.get("must_pass") is True,
    )


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that contains a JSON object. Returns an empty dict if the file is missing.

    Raises:
        ConfigError: The file cannot be read, or is not a valid JSON object.
    """
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def object_or_empty(path: Path) -> dict[str, Any]:
    """Reads a JSON or YAML file that contains a mapping. Returns an empty dict if the file is missing or invalid."""
    try:
        found = read_yaml(path) if path.suffix == ".yaml" else read_json_object(path)
    except (OSError, ConfigError):
        return {}
    return found if isinstance(found, dict) else {}


def _planned(run_dir: RunDir, totals: Mapping[str, Any]) -> int:
    """Returns the number of planned attempts, from `summary.json`, otherwise from the config; 0 if it is unknown."""
    if is_count(planned := totals.get("planned")):
        return planned
    tasks = read_object(run_dir.provenance).get("tasks")
    try:
        config = read_yaml(run_dir.config)
    except OSError:
        return 0
    attempts = config.get("attempts") if isinstance(config, dict) else None
    return len(tasks) * attempts if isinstance(tasks, dict | list) and is_count(attempts) else 0


def is_count(value: Any) -> TypeGuard[int]:
    """Returns whether an untrusted value is an int that is at least 0 and less than `MAX_COUNT`."""
    return type(value) is int and 0 <= value < MAX_COUNT
