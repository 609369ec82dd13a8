import asyncio
import json
import re
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.errors import (
    AgentError,
    AresExpError,
    DivergenceError,
    NondeterministicCallError,
    SnapshotUnsupportedError,
)
from ares_exp.testing.check_agent import check_agent
from ares_exp.testing.echo_container import RehearsalContainer
from tests.agents import careless_agents as careless
from tests.agents.stateful_agent import ForgetfulAgentFactory, StatefulAgentFactory
from tests.agents.thorough_agent import ThoroughAgentFactory, respond


async def test_number_of_replies_is_bounded() -> None:
    assert await check_agent(ShellAgentFactory(), replies=lambda _: "hm", max_steps=2) == 2


FOUND_AT = r"^Step 2: |^The replayed agent differs from its recording after 2 LLM responses"
"""While it runs, or when it is run again."""

MUTANTS: list[tuple[type[careless.CarelessAgent], type[AresExpError], str]] = [
    (careless.ObjectId, DivergenceError, r"tmux new -s agent-\d+.*got .*agent-\d+"),
    (careless.Now, DivergenceError, r"it was .*It is 2.*now it is .*It is 2"),
    (careless.Entropy, DivergenceError, r"it was .*, now it is "),
    (careless.TimeByName, DivergenceError, r"it was .*\d\.\d+.*, now it is .*\d\.\d+"),
    (careless.OwnGenerator, DivergenceError, r"it was .*0\.\d+.*, now it is .*0\.\d+"),
    (careless.SharedState, DivergenceError, r"it was .*I am agent 1\..* now it is .*I am agent 2\."),
    (careless.ExtraCall, DivergenceError, r"expected an LLM request.*got a call for exec .*once more"),
    (careless.SkippedCall, DivergenceError, r"expected a call for exec .*only once.*got an LLM request"),
    (careless.ReturnsEarly, DivergenceError, r"expected an LLM request.*but it ended without"),
    (careless.AnotherTimer, DivergenceError, r"expected a call for timer 0\.001 as in the recording, got 0\.002"),
    (careless.Socket, NondeterministicCallError, r"`create_connection`"),
    (careless.SocketInSecret, NondeterministicCallError, r"`create_connection`"),
    (careless.ThreadThatCalls, NondeterministicCallError, r"`call_soon_threadsafe`"),
    (careless.Subprocess, NondeterministicCallError, r"`subprocess_exec`"),
    (careless.Swallower, DivergenceError, r"echo \d+.*got .*echo \d+"),
    (careless.RunsAway, AgentError, r"kept running and never waited"),
    (careless.NeverWakes, AgentError, r"waits for something other than its LLM or its container"),
]


@pytest.mark.parametrize(("agent", "kind", "told"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS])
async def test_careless_agent_is_found(
    agent: type[careless.CarelessAgent], kind: type[AresExpError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(agent, "made"):
        monkeypatch.setattr(agent, "made", 0)
    with pytest.raises(kind) as caught:
        await check_agent(agent, replies=["yes"] * 4)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert re.search(FOUND_AT, message), message
    assert re.search(told, message), message


async def test_changed_request_settings_are_found_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(careless.OtherSettings, "made", 0)
    told = r"after 0 LLM responses.*settings of an LLM request .* differ from the recording"
    with pytest.raises(DivergenceError, match=told):
        await check_agent(careless.OtherSettings, replies=["yes"])


async def test_unrecordable_error_is_found() -> None:
    container = RehearsalContainer(careless.fails_in_its_own_way)
    with pytest.raises(SnapshotUnsupportedError, match=r"OwnError \(fail\)"):
        await check_agent(careless.ToldOfAnOwnError, replies=["yes"] * 4, container=container)


async def test_agent_that_waits_instead_of_ending_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(careless.NeverReturns, "made", 0)
    with pytest.raises(DivergenceError, match="first run of the agent ended, but the second run waited"):
        await check_agent(careless.NeverReturns, replies=["yes"] * 4)


async def test_agent_without_requests_is_refused() -> None:
    with pytest.raises(AgentError, match=r"^Step 0: .*without sending an LLM request"):
        await check_agent(careless.AsksNothing, replies=["yes"])


async def test_factory_may_be_a_local_class() -> None:
    class Local(careless.CarelessAgent):
        async def work(self, number: int) -> str:
            return "Hello."

    assert await check_agent(Local, replies=["yes"] * 9) == 4


async def test_stateful_agent_is_checked_by_its_state() -> None:
    assert await check_agent(StatefulAgentFactory(), replies=["a", "b", "done"]) == 3
    with pytest.raises(DivergenceError, match=r"^Step 1: .*sends a different request"):
        await check_agent(ForgetfulAgentFactory(), replies=["a", "b", "done"])


async def test_nondeterministic_agent_without_state_cannot_be_checked() -> None:
    def factory(**given: Any) -> Any:
        return careless.Now(**given)

    factory.deterministic = False  # type: ignore[attr-defined]
    with pytest.raises(SnapshotUnsupportedError, match=r"add get_state\(\)"):
        await check_agent(factory, replies=["yes"])


async def test_checks_run_concurrently() -> None:
    async def one(number: int) -> int:
        return await check_agent(
            ThoroughAgentFactory(),
            replies=["fine", "true", "fine", "done"],
            instruction=f"Number {number}.",
            container=RehearsalContainer(respond),
        )

    assert await asyncio.gather(*(one(number) for number in range(8))) == [4] * 8


async def test_rehearsal_container_copies_files(tmp_path: Any) -> None:
    container = RehearsalContainer()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text(json.dumps(1))
    await container.upload(tmp_path / "folder", "/there")
    await container.download("/there", tmp_path / "back")
    assert (tmp_path / "back" / "file").read_text() == "1"
