"""A policy that replays responses while the requests match the recorded requests, and logs each response once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import PendingRequest
from ares_exp.errors import PolicyError, RefusalError, StorageError, UnansweredError
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents, ResponseDeadline
from ares_exp.runs.resume.resumable_policy import ResumablePolicy
from ares_exp.trajectories.recorded_responses import Exchange, responses
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.request_diff import UserNormaliser, make_normalisers
from ares_exp.trajectories.response_log import LoggedEpisode, logged_episodes
from tests.unit.runs.resume.logs import log_in


class Client:
    """Answers with a number, and keeps what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.thinks = False

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.asked.append(str(request.messages[-1]["content"]))
        if self.thinks:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return LLMResponse.from_text(f"new {len(self.asked)}", cost=1.0)


class Placed(Client):
    """A client with a position, such as the second scripted reply."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str | None]] = []

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self.told.append((str(request.messages[-1]["content"]), response.text if response is not None else None))


class Told(EpisodeEvents):
    """Is in the given stages, one for each time that it is asked; keeps the responses that are to be paid for."""

    def __init__(self, *stages: int) -> None:
        super().__init__()
        self.stages = iter(stages)
        self.responses: list[str] = []

    @property
    def num_stages(self) -> int:
        return next(self.stages, 0)

    def pay(self, response: LLMResponse) -> None:
        super().pay(response)
        self.responses.append(response.text)


def request(text: str) -> LLMRequest:
    return LLMRequest([{"role": "user", "content": text}])


async def test_background_response_is_replayed_once(
    tmp_path: Path,
) -> None:
    started = LoggedEpisode("e1", "t", attempt=0, retry=0, seed=1, started_at=1.0)
    log, client, events = log_in(tmp_path, started), Client(), Told()
    log.start(())
    policy = ResumablePolicy(client, log, events=events)
    background_request = LLMRequest(
        [{"role": "user", "content": "title"}], origin=Origin("messages", conversation="side-1", is_background=True)
    )
    assert (await policy(request("one"))).text == "new 1"
    assert (await policy.respond_in_background(background_request)).text == "new 2"
    assert events.responses == ["new 1", "new 2"]

    [left] = logged_episodes(tmp_path)
    assert (len(left.exchanges), len(left.ahead)) == (1, 1)
    for order in ("background request first", "background request last"):
        again, told = Client(), Told()
        own = LoggedEpisode(order, "t", attempt=0, retry=1, seed=1, started_at=2.0, parent="e1")
        second = log_in(tmp_path / order, own)
        second.start(left.exchanges, left.ahead)
        policy = ResumablePolicy(again, second, earlier=left.exchanges, ahead=left.ahead, events=told)
        if order == "background request last":
            assert (await policy(request("one"))).text == "new 1"
            assert (await policy(request("two"))).text == "new 1"
        assert (await policy.respond_in_background(background_request)).text == "new 2"
        if order == "background request first":
            assert (await policy(request("one"))).text == "new 1"
            assert (await policy(request("two"))).text == "new 1"
        assert again.asked == ["two"]
        assert told.responses == ["new 1"], "nothing else is paid for again"
        assert told.usage.cost == 3.0
        assert (await policy.respond_in_background(background_request)).text == "new 2", (
            "asked anew, it is another call"
        )
        assert again.asked == ["two", "title"]


EARLIER = [
    Exchange(serialize_llm_request(request(f"q{number} at 12:00:0{number}")), LLMResponse.from_text(f"a{number}"))
    for number in range(3)
]


def resumed(folder: Path, client: Client | None = None, **options: Any) -> tuple[ResumablePolicy, Client]:
    client = client or Client()
    log = log_in(folder, LoggedEpisode("e", "fix", 0, 1, 7, 1.0, parent="d"))
    log.start(EARLIER)
    return ResumablePolicy(client, log, **{"earlier": EARLIER, **options}), client


def logged(folder: Path) -> list[str]:
    [log] = logged_episodes(folder)
    return [response.text for response in responses(log.exchanges)]


async def said(policy: ResumablePolicy, *texts: str) -> list[str]:
    return [(await policy(request(text))).text for text in texts]


async def test_responses_are_replayed_then_requested(tmp_path: Path) -> None:
    policy, client = resumed(tmp_path)
    texts = ["q0 at 12:00:00", "q1 at 12:00:01", "q2 at 18:30:59", "q3"]
    assert await said(policy, *texts) == ["a0", "a1", "a2", "new 1"]
    assert client.asked == ["q3"]
    assert (len(policy.given_again.responses), policy.given_again.diverged_at) == (3, None)
    assert logged(tmp_path) == ["a0", "a1", "a2", "new 1"]


async def test_policy_is_called_after_a_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy, client = resumed(tmp_path)
    texts = ["q0 at 12:00:00", "something else", "q2 at 12:00:02"]
    assert await said(policy, *texts) == ["a0", "new 1", "new 2"]
    assert client.asked == texts[1:]
    assert (len(policy.given_again.responses), policy.given_again.diverged_at) == (1, 1)
    [warning] = caplog.messages
    assert "episode e differs from the recorded one at step 1 (message 0 (user))" in warning
    assert logged(tmp_path) == ["a0", "new 1", "new 2"]


async def test_full_disk_at_divergence_ends_the_run(tmp_path: Path) -> None:
    policy, client = resumed(tmp_path / "responses")
    (tmp_path / "responses" / "e.jsonl").unlink()
    (tmp_path / "responses").rmdir()
    (tmp_path / "responses").write_text("no folder")
    with pytest.raises(StorageError):
        await policy(request("something else"))
    assert client.asked == []


async def test_unanswered_request_stays_unanswered(tmp_path: Path) -> None:
    earlier = [EARLIER[0], EARLIER[1]._replace(response=None), EARLIER[2]._replace(stage=1)]
    client, events = Placed(), Told(0, 0, 1, 1, 1)
    policy, _ = resumed(tmp_path, client, earlier=earlier, events=events)
    assert await said(policy, "q0 at 12:00:00") == ["a0"]
    with pytest.raises(UnansweredError):
        await policy(request("q1 at 12:00:01"))
    assert await said(policy, "q2 at 12:00:02", "q3") == ["a2", "new 1"]
    assert (client.asked, policy.given_again.diverged_at) == (["q3"], None)
    assert [one.text for one in policy.given_again.responses] == ["a0", "a2"]
    assert client.told == [("q0 at 12:00:00", "a0"), ("q1 at 12:00:01", None), ("q2 at 12:00:02", "a2")]


async def test_ended_stage_ends_at_the_same_request(tmp_path: Path) -> None:
    """More time is left than before, and no model is called."""
    earlier = [EARLIER[0], EARLIER[1]._replace(stage=1)]
    events = Told(0, 0, 0)
    policy, client = resumed(tmp_path, earlier=earlier, events=events)
    assert await said(policy, "q0 at 12:00:00") == ["a0"]
    with pytest.raises(UnansweredError):
        await policy(request("what was not asked"))
    events.stages = iter([1, 1, 1])
    assert await said(policy, "q1 at 12:00:01", "q2") == ["a1", "new 1"]
    assert (client.asked, policy.given_again.diverged_at, len(policy.given_again.responses)) == (["q2"], None, 2)
    [log] = logged_episodes(tmp_path)
    assert [(one.response and one.response.text, one.stage) for one in log.exchanges] == [
        ("a0", 0),
        (None, 0),
        ("a1", 1),
        ("new 1", 1),
    ]


async def test_unanswered_request_is_logged(tmp_path: Path) -> None:
    events = EpisodeEvents()
    policy, client = resumed(tmp_path, start_at=2, events=events)
    assert await said(policy, "q2 at 12:00:02") == ["a2"]
    client.error = TimeoutError()
    with pytest.raises(TimeoutError):
        await policy(request("q3"))
    assert len(logged_episodes(tmp_path)[0].exchanges) == 3, "its own error: the time was not up"

    async def ask_in_time() -> None:
        events.deadline = ResponseDeadline(60, 0.01)
        async with events.deadline.timer:
            await policy(request("q3"))

    client.thinks = True
    with pytest.raises(TimeoutError):
        await ask_in_time()
    client.thinks, events.deadline = False, None
    client.error = UnansweredError("none was recorded")
    with pytest.raises(UnansweredError):
        await policy(request("q4"))
    [log] = logged_episodes(tmp_path)
    assert [one.response for one in log.exchanges[3:]] == [None, None]


async def test_policy_with_position_gets_replayed_responses(tmp_path: Path) -> None:
    policy, client = resumed(tmp_path, Placed(), start_at=1)
    assert isinstance(client, Placed)
    await said(policy, "q1 at 12:00:01", "something else")
    assert client.told == [("q0 at 12:00:00", "a0"), ("q1 at 12:00:01", "a1")]
    assert client.asked == ["something else"]


async def test_invalid_response_is_neither_logged_nor_paid(tmp_path: Path) -> None:
    class Talker(Client):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            return "text"  # type: ignore[return-value]

    events = Told()
    policy, _ = resumed(tmp_path, Talker(), start_at=3, events=events)
    with pytest.raises(PolicyError, match="Expected the policy to return an LLMResponse, got str"):
        await policy(request("q3"))
    assert (logged(tmp_path), events.responses) == (["a0", "a1", "a2"], [])


async def test_paid_responses_are_reported(tmp_path: Path) -> None:
    events = Told()
    policy, client = resumed(tmp_path, start_at=2, events=events)
    await said(policy, "q2 at 12:00:02", "q3")
    client.error = RefusalError("no")
    client.error.response = LLMResponse.from_text("I refuse")
    with pytest.raises(RefusalError):
        await policy(request("q4"))
    assert events.responses == ["new 1", "I refuse"]


def in_conversation(conversation: str, text: str) -> LLMRequest:
    return LLMRequest([{"role": "user", "content": text}], origin=Origin("messages", conversation=conversation))


IN_CONVERSATIONS = [
    Exchange(
        serialize_llm_request(in_conversation(conversation, f"{conversation} {number}")),
        LLMResponse.from_text(f"{conversation} answer {number}"),
    )
    for conversation, number in (("main", 0), ("sub-a", 0), ("sub-b", 0), ("sub-a", 1), ("sub-b", 1), ("main", 1))
]


async def said_in(policy: ResumablePolicy, *asked: tuple[str, str]) -> list[str]:
    return [(await policy(in_conversation(conversation, text))).text for conversation, text in asked]


class Ahead(Client):
    max_concurrency_per_episode = 4


def resumed_in_conversations(
    folder: Path, client: Client | None = None, **options: Any
) -> tuple[ResumablePolicy, Client]:
    client = client or Client()
    log = log_in(folder, LoggedEpisode("e", "fix", 0, 1, 7, 1.0, parent="d"))
    log.start(IN_CONVERSATIONS)
    return ResumablePolicy(client, log, earlier=IN_CONVERSATIONS, **options), client


async def test_each_conversation_has_a_separate_order(tmp_path: Path) -> None:
    policy, client = resumed_in_conversations(tmp_path)
    order = [("main", 0), ("sub-b", 0), ("sub-b", 1), ("sub-a", 0), ("sub-a", 1), ("main", 1)]
    given = await said_in(policy, *((conversation, f"{conversation} {number}") for conversation, number in order))
    assert given == [f"{conversation} answer {number}" for conversation, number in order]
    assert await said_in(policy, ("sub-a", "sub-a 2")) == ["new 1"]
    assert client.asked == ["sub-a 2"]
    assert (len(policy.given_again.responses), policy.given_again.diverged_at) == (6, None)
    assert len(logged(tmp_path)) == 7


async def test_prefetching_waits_for_replay_of_other_conversations(tmp_path: Path) -> None:
    policy, client = resumed_in_conversations(tmp_path, client=Ahead())
    await said_in(policy, ("main", "main 0"), ("sub-a", "sub-a 0"), ("sub-a", "sub-a 1"))
    asked = [("sub-a", "sub-a 2"), ("sub-b", "sub-b 0"), ("main", "main 1")]
    pending = [PendingRequest(number, name, in_conversation(name, text)) for number, (name, text) in enumerate(asked)]
    policy.expect(pending)
    assert await said_in(policy, asked[0]) == ["new 1"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.asked == ["sub-a 2"]
    await policy.close()


async def test_diverged_conversation_does_not_affect_others(tmp_path: Path) -> None:
    policy, client = resumed_in_conversations(tmp_path)
    asked = [("main", "main 0"), ("sub-a", "another"), ("sub-a", "sub-a 1"), ("sub-b", "sub-b 0"), ("main", "main 1")]
    assert await said_in(policy, *asked) == ["main answer 0", "new 1", "new 2", "sub-b answer 0", "main answer 1"]
    assert client.asked == ["another", "sub-a 1"]
    assert policy.given_again.diverged_at == 1
    kept = [response for response in logged(tmp_path) if "sub-a" in response]
    assert kept == []
    assert {"new 1", "new 2", "main answer 1", "sub-b answer 1"} <= set(logged(tmp_path))


async def test_renamed_conversation_matches_by_first_request(tmp_path: Path) -> None:
    policy, client = resumed_in_conversations(tmp_path)
    asked = [("main", "main 0"), ("sub-x", "sub-b 0"), ("sub-x", "sub-b 1"), ("sub-y", "never asked")]
    assert await said_in(policy, *asked) == ["main answer 0", "sub-b answer 0", "sub-b answer 1", "new 1"]
    assert policy.given_again.diverged_at is None
    assert client.asked == ["never asked"]


async def test_conversation_names_are_normalised(tmp_path: Path) -> None:
    normalisers = make_normalisers([UserNormaliser(pattern="(main) [0-9]", replacement="\\1")])
    policy, client = resumed_in_conversations(tmp_path, normalisers=normalisers)
    assert await said_in(policy, ("main", "main 7")) == ["main answer 0"]
    assert client.asked == []


async def test_equivalent_spelling_is_replayed(tmp_path: Path) -> None:
    policy, client = resumed_in_conversations(tmp_path)
    parts = [{"type": "text", "text": "main "}, {"type": "text", "text": "0", "cache_control": {"type": "ephemeral"}}]
    spelt = LLMRequest([{"role": "user", "content": parts}], origin=Origin("messages"))
    assert (await policy(spelt)).text == "main answer 0"
    assert client.asked == []
