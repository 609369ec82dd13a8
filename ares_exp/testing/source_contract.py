"""Conformance suite for environment sources."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EnvironmentSource, EpisodeParts, SourceBase, as_source

TIMEOUT_SEC = 120.0
"""Time limit in seconds for the start of one episode. It is long, because the machine may be busy."""


class SourceContract:
    """The suite for environment sources. It calls no LLM.

    Define the fixture `source`. If its tasks cannot run in local containers (`container=local`), also define `parts`.
    """

    @pytest.fixture
    def source(self) -> EnvironmentSource:
        """Returns a source that has not been loaded."""
        raise NotImplementedError

    @pytest.fixture
    def parts(self, tmp_path: Path) -> EpisodeParts:
        """Returns the parts from which the source makes an episode: container factory, agent factory and limits."""
        limits = EpisodeLimits()
        return EpisodeParts(LocalContainerFactory(), ShellAgentFactory(), limits, seed=0, output_dir=tmp_path / "files")

    @pytest.fixture
    def names(self, source: EnvironmentSource) -> list[str]:
        """Loads the source, and returns the names of its tasks."""
        return list(source.load(_listen))

    @pytest.fixture
    def loaded(self, source: EnvironmentSource, names: list[str]) -> Iterator[SourceBase]:
        """Yields the loaded source with the defaults of `SourceBase`, and closes it after the test."""
        complete = as_source(source)
        yield complete
        asyncio.run(complete.close())

    def test_required_members_exist(self, source: EnvironmentSource) -> None:
        assert isinstance(source, EnvironmentSource)
        assert source.path is None or isinstance(source.path, Path)

    def test_task_names_are_unique(self, names: list[str]) -> None:
        assert names
        assert all(isinstance(name, str) and name for name in names)
        assert len(set(names)) == len(names)

    def test_reload_gives_the_same_tasks(self, loaded: SourceBase, names: list[str]) -> None:
        assert list(loaded.load(_listen)) == names

    def test_tasks_pass_their_checks(self, loaded: SourceBase, parts: EpisodeParts) -> None:
        asyncio.run(loaded.preflight())
        loaded.check(parts, report=_listen)

    def test_each_episode_has_a_separate_environment(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:
        one, other = loaded.make(names[0], parts), loaded.make(names[0], parts)
        assert one is not other

    def test_environment_without_reset_can_be_closed(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:

        async def close() -> None:
            environment = loaded.make(names[0], parts)
            await environment.close()
            await environment.close()

        asyncio.run(close())

    def test_episode_starts(self, loaded: SourceBase, names: list[str], parts: EpisodeParts) -> None:

        async def start() -> None:
            await loaded.preflight()
            environment = loaded.make(names[0], parts)
            try:
                first = await environment.reset()
                assert first.first()
                assert (first.reward, first.discount) == (None, None)
                assert first.observation is not None
            finally:
                await environment.close()

        asyncio.run(asyncio.wait_for(start(), TIMEOUT_SEC))

    def test_digest_is_stable(self, loaded: SourceBase, names: list[str]) -> None:
        digests = {name: loaded.digest(name) for name in names[:3]}
        assert digests == {name: loaded.digest(name) for name in digests}
        assert all(digest is None or isinstance(digest, str) for digest in digests.values())

    def test_tasks_and_origins_match_the_names(self, loaded: SourceBase, names: list[str]) -> None:
        assert [task.name for task in loaded.tasks] in ([], names)
        assert set(loaded.origins) <= set(names)
        assert not loaded.positions or set(names) <= set(loaded.positions)

    def test_dropped_tasks_are_omitted(self, loaded: SourceBase, names: list[str], parts: EpisodeParts) -> None:
        kept = names[:1]
        loaded.keep(kept)
        assert [task.name for task in loaded.tasks] in ([], kept)
        asyncio.run(loaded.preflight())
        loaded.check(parts, report=_listen)

    def test_declared_abilities_match_the_environment(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:
        for said in (loaded.needs_container, loaded.has_solutions, loaded.exports_state, loaded.loads_offline):
            assert isinstance(said, bool)
        environment = loaded.make(names[0], parts)
        if loaded.exports_state:
            assert {"export_state", "step_count"} <= set(dir(environment))

    def test_close_is_idempotent(self, source: EnvironmentSource) -> None:
        async def close() -> None:
            await as_source(source).close()
            await as_source(source).close()

        asyncio.run(close())


def _listen(warning: str) -> None:
    assert isinstance(warning, str)
