import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_dir import RunDir
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.trajectories.chats import chat

DATA = re.compile(r'<script type="application/(json|octet-stream)" id="([^"]*)">(.*?)</script>', re.DOTALL)


def row(task: str, attempt: int, reward: float | None, **more: Any) -> EpisodeResult:
    outcome = more.pop("outcome", Outcome.COMPLETED if reward is not None else Outcome.AGENT_ERROR)
    return EpisodeResult(f"{task}-{attempt}", task, attempt, 0, outcome, reward, num_steps=3, started_at=1.0, **more)


def run_of(path: Path, rows: Sequence[EpisodeResult], *episodes: EpisodeTrajectory) -> Path:
    """A run directory; without episodes, one of each row."""
    run = RunDir(path)
    run.trajectories.mkdir(parents=True, exist_ok=True)
    run.episodes.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in rows))
    run.config.write_text("attempts: 1\n")
    for episode in episodes or [replace(chat(one.episode_id, one.task_name), outcome=one.outcome) for one in rows]:
        (run.trajectories / f"{episode.episode_id}.json").write_text("".join(dump_episode(episode)))
    return path


def data_of(page: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return data_in(page.read_text())


def data_in(page: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    payload: dict[str, Any] = {}
    blocks: dict[str, Any] = {}
    for kind, name, text in DATA.findall(page):
        if kind == "json":
            payload = json.loads(text)
        else:
            blocks[html.unescape(name)] = json.loads(zlib.decompress(base64.b64decode(text)))
    return payload, {one["id"]: one for one in blocks.values()}
