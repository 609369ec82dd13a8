"""Conformance suite for trajectory collectors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.collector import CollectorBase, TrajectoryCollector, as_collector
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response


def episode_records(text: str, length: int = 4, *, reward: float | None = 1.0) -> list[StepRecord]:
    """Creates the step records of an episode with `length` steps, from FIRST to LAST.

    `text` is part of every message, so that tests can distinguish episodes. `reward` is the reward of LAST.
    """
    messages = [{"role": "user", "content": f"{text}: start"}]
    response = serialize_llm_response(LLMResponse.from_text(f"{text}: yes"))
    records = [StepRecord(0, "FIRST", serialize_llm_request(LLMRequest(list(messages))), None, None, None, 1.0)]
    for index in range(1, length - 1):
        messages += [
            {"role": "assistant", "content": f"{text}: yes"},
            {"role": "user", "content": f"{text}: {index}"},
        ]
        asked = serialize_llm_request(LLMRequest(list(messages)))
        records.append(StepRecord(index, "MID", asked, response, 0.0, 1.0, 1.0 + index))
    return [*records, StepRecord(length - 1, "LAST", None, response, reward, 0.0, float(length))]


def _recorded(collector: TrajectoryCollector, records: Sequence[StepRecord], **ending: bool) -> EpisodeTrajectory:
    collector.begin_episode(task_name="task a")
    for record in records:
        collector.record_step(record)
    return collector.end_episode(**ending)


class CollectorContract:
    """The suite for trajectory collectors. Define the fixture `collector`."""

    keeps_steps = True
    """Whether the trajectory from `end_episode` contains the steps. Override it if your collector omits the steps."""

    @pytest.fixture
    def collector(self) -> TrajectoryCollector:
        """Returns the collector to test, in which no episode has started."""
        raise NotImplementedError

    @pytest.fixture
    def complete(self, collector: TrajectoryCollector) -> CollectorBase:
        """Returns the collector with the defaults of `CollectorBase` for missing optional members."""
        return as_collector(collector)

    def test_required_members_exist(self, collector: TrajectoryCollector) -> None:
        assert isinstance(collector, TrajectoryCollector)

    def test_episode_has_its_steps(self, collector: TrajectoryCollector) -> None:
        records, before = episode_records("a"), time.time()
        found = _recorded(collector, records)
        assert (found.task_name, found.truncated, found.outcome) == ("task a", False, Outcome.COMPLETED)
        assert before - 1 <= found.start_time <= found.end_time <= time.time() + 1
        if self.keeps_steps:
            assert [step.to_dict() for step in found.steps] == [record.to_dict() for record in records]
            assert (found.num_steps, found.total_reward) == (4, 1.0)

    def test_truncation_is_recorded(self, collector: TrajectoryCollector) -> None:
        assert _recorded(collector, episode_records("a"), truncated=True).truncated

    def test_missing_reward_is_none(self, collector: TrajectoryCollector) -> None:
        found = _recorded(collector, episode_records("a", 2, reward=None), truncated=True)
        assert found.total_reward is None
        assert [step.reward for step in found.steps] == ([None, None] if self.keeps_steps else [])

    def test_consecutive_episodes_are_recorded(self, collector: TrajectoryCollector) -> None:
        ids = set()
        for text in "abc":
            collector.begin_episode(task_name=text)
            collector.record_step(episode_records(text)[0])
            found = collector.end_episode(truncated=True)
            ids.add(found.episode_id)
            assert (found.task_name, found.num_steps) == (text, int(self.keeps_steps))
        assert len(ids) == 3

    def test_step_without_an_episode_is_refused(self, collector: TrajectoryCollector) -> None:
        with pytest.raises(RuntimeError):
            collector.record_step(episode_records("a")[0])

    def test_end_without_an_episode_is_refused(self, collector: TrajectoryCollector) -> None:
        with pytest.raises(RuntimeError):
            collector.end_episode()

    def test_step_after_the_end_is_refused(self, collector: TrajectoryCollector) -> None:
        _recorded(collector, episode_records("a")[:1])
        with pytest.raises(RuntimeError):
            collector.record_step(episode_records("a")[1])

    def test_episode_metadata_is_recorded(self, complete: CollectorBase) -> None:
        if not isinstance(complete, CollectorBase) or not complete.keeps_apart:
            pytest.skip("it records one episode at a time")
        handle = complete.begin_episode(
            task_name="a", episode_id="a__0__0badcafe", start_time=2.5, metadata={"attempt": 3}
        )
        error = ErrorInfo("AgentError", "It failed.")
        found = complete.end_episode(outcome=Outcome.AGENT_ERROR, error=error, end_time=4.0, episode=handle)
        assert (found.episode_id, found.start_time, found.end_time) == ("a__0__0badcafe", 2.5, 4.0)
        assert (found.metadata, found.outcome, found.error) == ({"attempt": 3}, Outcome.AGENT_ERROR, error)

    def test_concurrent_episodes_are_separate(self, complete: CollectorBase) -> None:
        if not complete.keeps_apart:
            pytest.skip("it records one episode at a time")
        names = [f"task {number}" for number in range(8)]
        handles = {name: complete.begin_episode(task_name=name) for name in names}
        together = threading.Barrier(len(names))

        def record(name: str) -> None:
            together.wait()
            for one in episode_records(name, 12):
                complete.record_step(one, episode=handles[name])

        with ThreadPoolExecutor(len(names)) as threads:
            list(threads.map(record, names))
        for name in reversed(names):
            found = complete.end_episode(episode=handles[name])
            assert found.task_name == name
            if self.keeps_steps:
                expected = [record.observation for record in episode_records(name, 12)]
                assert [step.observation for step in found.steps] == expected

    def test_concurrent_episodes_need_a_handle(self, complete: CollectorBase) -> None:
        if not complete.keeps_apart:
            pytest.skip("it records one episode at a time")
        handles = [complete.begin_episode(task_name=name) for name in "ab"]
        with pytest.raises(RuntimeError):
            complete.record_step(episode_records("a")[0])
        complete.end_episode(episode=handles[0])
        with pytest.raises(RuntimeError):
            complete.record_step(episode_records("a")[0], episode=handles[0])
        complete.record_step(episode_records("b")[0])
        assert complete.end_episode().task_name == "b"

    def test_close_is_idempotent(self, complete: CollectorBase) -> None:
        complete.close()
        complete.close()
