"""Environments in a host, behind the contract of every environment."""

from __future__ import annotations

import pytest

from ares_exp.environment import MinimalEnvironment
from ares_exp.runs.executors import remote_host
from ares_exp.testing.environment_contract import EnvironmentContract
from ares_exp.wrappers.registry import make
from tests.unit.containers.local_containers import needs_local
from tests.unit.environments.test_ares_adapter import Wrapped, adapted
from tests.unit.runs.executors.hosted import HostedEnvironment
from tests.unit.testing.test_bundled_parts import SUBMIT, code_environment


@pytest.fixture(autouse=True)
def _long_wait_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a host that still waits for news after it has ended exceed the time limit of the contract."""
    monkeypatch.setattr(remote_host, "NEWS_SEC", 60.0)


@needs_local
class TestCodeEnvironment(EnvironmentContract):
    replies = ("Hm.", SUBMIT)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = code_environment()
        return HostedEnvironment(lambda: inside)


class TestTwentyQuestions(EnvironmentContract):
    replies = ("Is it alive?",)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = make("twenty_questions:0:3")
        return HostedEnvironment(lambda: inside)


class TestAres(EnvironmentContract):
    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = adapted(Wrapped())
        return HostedEnvironment(lambda: inside)

    def test_timed(self, environment: MinimalEnvironment) -> None:
        """In a run the time of such an environment is kept around it, in the host."""
