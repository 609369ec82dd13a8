import functools
from typing import Any, Protocol

import pytest

from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory
from ares_exp.agents.shell_agent import ShellAgent, ShellAgentFactory
from ares_exp.config.parts import has_members, import_name, name_of
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.source import SourceBase, as_source
from ares_exp.errors import ConfigError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy, as_policy


class Tasks:
    path = None
    loads_offline = True

    def load(self, report: object) -> list[str]:
        return ["a"]

    def check(self, parts: object, *, report: object) -> None: ...

    def make(self, task_name: str, parts: object) -> Any:
        raise NotImplementedError


def make_agent(**given: Any) -> Any:
    return given


async def respond(request: LLMRequest) -> LLMResponse:
    return LLMResponse.from_text("yes")


async def test_source_gets_defaults_for_missing_members() -> None:
    source = as_source(Tasks())
    assert (source.load(print), source.loads_offline) == (["a"], True)
    assert (source.needs_container, source.exports_state, source.digest("a")) == (True, False, None)
    assert ([*source.tasks], dict(source.origins)) == ([], {})
    await source.preflight()
    await source.close()
    assert (name_of(source), import_name(source)) == ("Tasks", f"{__name__}.Tasks")


def test_part_that_inherits_its_contract_is_unchanged() -> None:
    class Whole(Tasks, SourceBase):
        pass

    source, factory = Whole(), ShellAgentFactory()
    assert as_source(source) is source
    assert as_agent_factory(factory) is factory
    view = as_source(Tasks())
    assert as_source(view) is view


def test_failing_property_does_not_count_as_missing() -> None:
    class Broken(Tasks):
        @property
        def origins(self) -> object:
            return self.no_such  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such"):
        _ = as_source(Broken()).origins  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (make_agent, "make_agent"),
        (functools.partial(make_agent, container=None), "make_agent"),
        (ShellAgent, "ShellAgent"),
        (functools.partial(ShellAgent, max_output_chars=1), "ShellAgent"),
        (ShellAgentFactory(), "ShellAgent"),
    ],
)
def test_agent_is_named_after_its_factory(factory: Any, name: str) -> None:
    found = as_agent_factory(factory)
    assert (found.name, found.deterministic, found.supports >= set()) == (name, True, True)
    assert found.source_digest.startswith("sha256:")


def test_attributes_of_an_agent_factory_are_used() -> None:
    def factory(**given: Any) -> Any:
        return given

    factory.deterministic, factory.options = False, {"a": 1}  # type: ignore[attr-defined]
    found: AgentFactoryBase = as_agent_factory(factory)
    assert (found.deterministic, found.options, found(container=1, llm_client=2)) == (  # type: ignore[arg-type]
        False,
        {"a": 1},
        {"container": 1, "llm_client": 2},
    )


async def test_plain_client_is_a_policy() -> None:
    policy = as_policy(respond)
    assert isinstance(policy, Policy)
    assert name_of(policy) == "respond"
    assert (policy.needs_solution, policy.seed_of("a", 0), policy.report([])) == (False, None, None)
    client = policy.for_episode(EpisodeSpec("a"))
    assert (await client(LLMRequest([]))).text == "yes"
    with pytest.raises(ConfigError, match="callable"):
        as_policy(3)  # type: ignore[arg-type]


def test_backend_without_snapshots_is_refused() -> None:
    class Moon:
        name = "moon"

    with pytest.raises(ConfigError, match="container=moon cannot capture"):
        as_container_factory(Moon()).check_snapshots()  # type: ignore[arg-type]


class Timer(Protocol):
    left: float | None

    def wait(self) -> None: ...


class Whole:
    left = None

    def wait(self) -> None: ...


class WithAValueOfItsOwn:
    def __init__(self) -> None:
        self.left = None

    def wait(self) -> None: ...


class WithoutMethod(WithAValueOfItsOwn):
    wait = None  # type: ignore[assignment]


class WithoutValue:
    def wait(self) -> None: ...


class Derived(Timer):
    pass


class Failing(WithoutValue):
    @property
    def left(self) -> float:
        raise RuntimeError("looked at")


@pytest.mark.parametrize(
    ("part", "has"),
    [
        (Whole(), True),
        (WithAValueOfItsOwn(), True),
        (Derived(), True),
        (Failing(), True),
        (WithoutMethod(), False),
        (WithoutValue(), False),
        (respond, False),
    ],
)
def test_contract_members_may_be_class_or_instance_attributes(part: object, has: bool) -> None:
    assert has_members(part, Timer) is has


def test_instance_attribute_does_not_affect_the_class() -> None:
    with_value, without = WithoutValue(), WithoutValue()
    with_value.left = 3.0  # type: ignore[attr-defined]
    assert [has_members(part, Timer) for part in (without, with_value, without)] == [False, True, False]
