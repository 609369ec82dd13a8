"""Conformance suite of environment sources."""

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
"""Time limit for the start of one episode, on a loaded machine."""


class SourceContract:
    """The suite of environment sources.

    Define the fixture `source`, and `parts` if its tasks need other containers than local containers.

    Only `test_an_episode_starts` starts a container; no test asks an LLM.
    """

    @pytest.fixture
    def source(self) -> EnvironmentSource:
        """Returns a source that has not been loaded."""
        raise NotImplementedError

    @pytest.fixture
    def parts(self, tmp_path: Path) -> EpisodeParts:
        """Returns the parts of an episode for the environments of the source: containers, agent, limits."""
        limits = EpisodeLimits()
        return EpisodeParts(LocalContainerFactory(), ShellAgentFactory(), limits, seed=0, output_dir=tmp_path / "files")

    @pytest.fixture
    def names(self, source: EnvironmentSource) -> list[str]:
        """Loads the source, and returns the names of its tasks."""
        return list(source.load(_listen))

    @pytest.fixture
    def loaded(self, source: EnvironmentSource, names: list[str]) -> Iterator[SourceBase]:
        """Yields the loaded source as a `SourceBase`."""
        complete = as_source(source)
        yield complete
        asyncio.run(complete.close())

    def test_it_has_the_members_that_are_needed(self, source: EnvironmentSource) -> None:
        assert isinstance(source, EnvironmentSource)
        assert source.path is None or isinstance(source.path, Path)

    def test_it_names_its_tasks(self, names: list[str]) -> None:
        assert names
        assert all(isinstance(name, str) and name for name in names)
        assert len(set(names)) == len(names)

    def test_the_tasks_are_the_same_when_they_are_loaded_again(self, loaded: SourceBase, names: list[str]) -> None:
        assert list(loaded.load(_listen)) == names

    def test_its_tasks_can_be_run_with_these_parts(self, loaded: SourceBase, parts: EpisodeParts) -> None:
        asyncio.run(loaded.preflight())
        loaded.check(parts, report=_listen)

    def test_each_episode_has_an_environment_of_its_own(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:
        one, other = loaded.make(names[0], parts), loaded.make(names[0], parts)
        assert one is not other

    def test_what_was_never_reset_can_be_closed(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:

        async def close() -> None:
            environment = loaded.make(names[0], parts)
            await environment.close()
            await environment.close()

        asyncio.run(close())

    def test_an_episode_starts(self, loaded: SourceBase, names: list[str], parts: EpisodeParts) -> None:

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

    def test_a_digest_stays_the_same(self, loaded: SourceBase, names: list[str]) -> None:
        digests = {name: loaded.digest(name) for name in names[:3]}
        assert digests == {name: loaded.digest(name) for name in digests}
        assert all(digest is None or isinstance(digest, str) for digest in digests.values())

    def test_its_tasks_and_origins_are_those_that_it_names(self, loaded: SourceBase, names: list[str]) -> None:
        assert [task.name for task in loaded.tasks] in ([], names)
        assert set(loaded.origins) <= set(names)

    def test_tasks_that_are_not_kept_are_left_out(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:
        kept = names[:1]
        loaded.keep(kept)
        assert [task.name for task in loaded.tasks] in ([], kept)
        asyncio.run(loaded.preflight())
        loaded.check(parts, report=_listen)

    def test_it_says_what_its_environments_can_do(
        self, loaded: SourceBase, names: list[str], parts: EpisodeParts
    ) -> None:
        for said in (loaded.needs_container, loaded.has_solutions, loaded.exports_state, loaded.loads_offline):
            assert isinstance(said, bool)
        environment = loaded.make(names[0], parts)
        if loaded.exports_state:
            assert {"export_state", "step_count"} <= set(dir(environment))

    def test_it_can_be_closed_twice(self, source: EnvironmentSource) -> None:
        async def close() -> None:
            await as_source(source).close()
            await as_source(source).close()

        asyncio.run(close())


def _listen(warning: str) -> None:
    assert isinstance(warning, str)
