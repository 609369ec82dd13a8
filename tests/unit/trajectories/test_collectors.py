"""Collectors: what is on disk while an episode goes on, when it has ended, and when it cannot be written."""

import os
import resource
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import (
    JsonlTrajectoryCollector,
    JsonTrajectoryCollector,
    MemoryTrajectoryCollector,
    NullTrajectoryCollector,
)
from ares_exp.trajectories.files.line_file import has_writer
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord
from tests.unit.trajectories.chats import chat, read_episodes, salvaged

RESPONSE = LLMResponse.from_text("a response of the policy")


def records(text: str = "x") -> list[StepRecord]:
    return list(chat(task=text).steps)


def test_memory_collector_orders_episodes_by_their_end() -> None:
    collector = MemoryTrajectoryCollector(keep=2)
    handles = [collector.begin_episode(task_name=name, metadata={"attempt": 3}) for name in "abc"]
    for handle in reversed(handles):
        collector.end_episode(episode=handle)
    assert [episode.task_name for episode in collector.episodes] == ["b", "a"]
    assert [episode.task_name for episode in collector.episodes[-1:]] == ["a"]
    assert collector.episodes[0].metadata == {"attempt": 3}


def test_json_steps_are_written_immediately(tmp_path: Path) -> None:
    collector = JsonTrajectoryCollector(tmp_path)
    collector.begin_episode(task_name="t", episode_id="e", metadata={"seed": 1})
    for count, record in enumerate(records(), 1):
        collector.record_step(record)
        [partial], problems = salvaged(tmp_path / "e.json")
        assert partial.steps == tuple(records()[:count])
        assert problems == []
        assert partial.outcome is (Outcome.COMPLETED if count == 4 else Outcome.LOST)
        assert partial.metadata == {"seed": 1}
        assert has_writer(tmp_path)
    trajectory = collector.end_episode()
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    assert EpisodeTrajectory.load(tmp_path / "e.json") == trajectory
    assert not has_writer(tmp_path)


def test_jsonl_steps_are_written_immediately(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    collector = JsonlTrajectoryCollector(path)
    handles = [collector.begin_episode(task_name=name) for name in "ab"]
    for count, record in enumerate(records(), 1):
        for handle in handles:
            collector.record_step(record, episode=handle)
        assert [episode.num_steps for episode in salvaged(path)[0]] == [count, count]
        assert has_writer(path)
    ended = [collector.end_episode(episode=handle) for handle in handles]
    assert list(read_episodes(path)) == ended
    assert not has_writer(path)


def test_jsonl_is_appended_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"type": "beg')
    collector = JsonlTrajectoryCollector(path)
    collector.begin_episode(task_name="t")
    ended = collector.end_episode()
    episodes, problems = salvaged(path)
    assert episodes == [ended]
    assert len(problems) == 1


@pytest.mark.parametrize("kind", [JsonTrajectoryCollector, JsonlTrajectoryCollector])
def test_file_is_synced_when_episode_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    synced: list[bool] = []

    def spy(descriptor: int, really: Any = os.fsync) -> None:
        really(descriptor)
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", spy)
    collector = kind(tmp_path / "t.jsonl")
    collector.begin_episode(task_name="t")
    collector.record_step(records()[0])
    assert synced == []
    collector.end_episode()
    assert set(synced) == {False, True}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 200, 600])
async def test_steps_survive_a_temporarily_full_disk(
    tmp_path: Path, counting: Any, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    collectors = {
        "json": JsonTrajectoryCollector(tmp_path / "json"),
        "jsonl": JsonlTrajectoryCollector(tmp_path / "t.jsonl"),
        "memory": MemoryTrajectoryCollector(),
    }
    env = TrajectoryCollectingEnvironment(counting(5), collectors, episode_id="e")
    with full_disk(size):
        step = await env.reset()
        for _ in range(4):
            step = await env.step(RESPONSE)
    await env.step(RESPONSE)
    assert step.step_type == "MID"
    assert env.collector_failures == 2  # once each, not at every step
    assert "The json collector failed in record_step: OSError" in caplog.text
    [kept] = collectors["memory"].episodes
    assert kept.num_steps == 6
    assert EpisodeTrajectory.load(tmp_path / "json" / "e.json").steps == kept.steps
    [appended] = list(read_episodes(tmp_path / "t.jsonl"))
    assert appended.steps == kept.steps


@pytest.mark.parametrize("kind", [JsonTrajectoryCollector, JsonlTrajectoryCollector])
def test_unencodable_step_loses_only_itself(tmp_path: Path, kind: Any) -> None:
    """The encoder knows its messages then, the file does not: later steps must not refer to them."""
    collector = kind(tmp_path / "e.jsonl")
    collector.begin_episode(task_name="t", episode_id="e")
    first, *_, last = records()
    told = {"role": "user", "content": "only told now"}
    collector.record_step(first)
    with pytest.raises(ValueError, match="integer string"):
        collector.record_step(StepRecord(1, "MID", {"messages": [told, {"n": 10**5000}]}, None, 0.0, 1.0, 0.0))
    collector.record_step(StepRecord(2, "MID", {"messages": [told]}, None, 0.0, 1.0, 0.0))
    collector.record_step(last)
    ended = collector.end_episode()
    assert [step.step_index for step in ended.steps] == [0, 2, 3]
    files = tmp_path / "e.jsonl"
    assert (list(read_episodes(files)) if files.is_file() else [EpisodeTrajectory.load(files / "e.json")]) == [ended]


def test_existing_episode_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dead.json").write_text("what a dead process left")
    (tmp_path / "ended.json.zst").write_text("an episode")
    collector = JsonTrajectoryCollector(tmp_path)
    for episode_id in ("dead", "ended"):
        with pytest.raises(FileExistsError, match="Expected a new episode id"):
            collector.begin_episode(task_name="t", episode_id=episode_id)
    collector.begin_episode(task_name="t", episode_id="new")
    collector.end_episode()
    assert (tmp_path / "dead.json").read_text() == "what a dead process left"
    assert (tmp_path / "ended.json.zst").read_text() == "an episode"


@pytest.mark.parametrize("kind", [JsonTrajectoryCollector, MemoryTrajectoryCollector])
def test_unserializable_metadata_is_refused_immediately(tmp_path: Path, counting: Any, kind: Any) -> None:
    collector = kind() if kind is MemoryTrajectoryCollector else kind(tmp_path / "t.jsonl")
    with pytest.raises(TypeError, match="JSON-like"):
        collector.begin_episode(task_name="t", metadata={"folder": tmp_path})
    with pytest.raises(TypeError, match="JSON-like"):
        TrajectoryCollectingEnvironment(counting(), collector, metadata={"folder": tmp_path})
    assert list(tmp_path.iterdir()) == []


class Failing(NullTrajectoryCollector):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def begin_episode(self, **more: Any) -> Any:
        self._fail("begin")
        return super().begin_episode(**more)

    def record_step(self, record: Any, *, episode: Any = None) -> None:
        self._fail("record")

    def end_episode(self, **more: Any) -> Any:
        self._fail("end")
        return super().end_episode(**more)

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ValueError(f"no {where}")


@pytest.mark.parametrize(("where", "failures"), [("begin", 1), ("record", 3), ("end", 1)])
async def test_failing_collector_does_not_affect_others(
    tmp_path: Path, counting: Any, where: str, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryTrajectoryCollector()
    collectors = {"first": Failing(where), "json": JsonTrajectoryCollector(tmp_path), "last": memory}
    async with TrajectoryCollectingEnvironment(counting(2), collectors, episode_id="e") as env:
        await env.reset()
        await env.step(RESPONSE)
        assert (await env.step(RESPONSE)).last()
    assert env.collector_failures == failures
    assert f"The first collector failed in {where}" in caplog.text
    assert memory.episodes[0] == EpisodeTrajectory.load(tmp_path / "e.json")
    assert env.trajectory.num_steps == 3


@pytest.mark.parametrize("kind", [JsonTrajectoryCollector, JsonlTrajectoryCollector])
def test_deleted_file_is_written_again_at_the_end(tmp_path: Path, kind: Any) -> None:
    collector = kind(tmp_path / "t.jsonl")
    first, second = (collector.begin_episode(task_name="t", episode_id=name) for name in "ab")
    for handle in (first, second):
        collector.record_step(records()[0], episode=handle)
    path = tmp_path / "t.jsonl"
    if kind is JsonTrajectoryCollector:
        shutil.rmtree(path)
    else:
        path.unlink()
    collector.record_step(records()[1], episode=first)
    ended = [collector.end_episode(episode=first), collector.end_episode(episode=second)]
    assert [episode.num_steps for episode in ended] == [2, 1]
    files = [path] if path.is_file() else [path / "a.json", path / "b.json"]
    assert [episode for file in files for episode in read_episodes(file)] == ended


@pytest.mark.parametrize("kind", [JsonTrajectoryCollector, JsonlTrajectoryCollector])
def test_threads_share_a_collector(tmp_path: Path, kind: Any) -> None:
    collector = kind(tmp_path / "t.jsonl")
    ended: list[EpisodeTrajectory] = []

    def execute(number: int) -> None:
        handle = collector.begin_episode(task_name=f"task {number}")
        for record in records(text=str(number)):
            collector.record_step(record, episode=handle)
        ended.append(collector.end_episode(episode=handle))

    threads = [threading.Thread(target=execute, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 40
    if kind is JsonlTrajectoryCollector:
        loaded = list(read_episodes(tmp_path / "t.jsonl"))
    else:
        loaded = [EpisodeTrajectory.load(path) for path in (tmp_path / "t.jsonl").iterdir()]
    assert sorted(loaded, key=lambda e: e.episode_id) == sorted(ended, key=lambda e: e.episode_id)
    for episode in loaded:
        assert episode.steps == tuple(records(text=episode.task_name.removeprefix("task ")))


async def test_later_message_edits_do_not_change_records(counting: Any) -> None:
    class Editing(counting):  # type: ignore[misc]
        def _observe(self) -> Any:
            self.messages.append({"role": "user", "content": [{"type": "text", "text": f"{len(self.messages)}"}]})
            return {"messages": self.messages, "tools": [{"name": "t"}]}

    env = Editing(3)
    memory = MemoryTrajectoryCollector()
    collecting = TrajectoryCollectingEnvironment(env, memory)
    await collecting.reset()
    await collecting.step(RESPONSE)
    env.messages[0]["content"][0]["text"] = "changed"
    env.messages.clear()
    await collecting.step(RESPONSE)
    await collecting.close()
    shown = [[m["content"][0]["text"] for m in step.observation["messages"]] for step in memory.episodes[0].steps]
    assert shown == [["0"], ["0", "1"], ["0"]]
