"""The environment of twenty questions: what a game is worth, how it ends, and what its oracle may do to it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import Environment, TimeStep
from ares_exp.environments import twenty_questions
from ares_exp.environments.episode_limits import EpisodeLimits, limited
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.twenty_questions import FactsOracle, TwentyQuestionsEnvironment, oracle_model
from ares_exp.errors import ConfigError, EndpointTimeoutError, EpisodeStateError, OracleResponseError, PreflightError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.policy import Policy
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.records.results import EnvironmentUsage, Outcome
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector
from ares_exp.wrappers.async_gym import wrap_as_gym

OBJECTS = twenty_questions.load_objects()
FACTS = FactsOracle(OBJECTS)
CAT = {"task": "cat"}


say = LLMResponse.from_text


def game(oracle: OwnModel | LLMClient = FACTS, **options: Any) -> TwentyQuestionsEnvironment:
    return TwentyQuestionsEnvironment(OBJECTS, oracle=oracle, **options)


def last_said(time_step: TimeStep[LLMRequest]) -> str:
    return str(time_step.observation.messages[-1]["content"])


async def test_game_is_won() -> None:
    async with game() as env:
        assert isinstance(env, Environment)
        first = await env.reset(options=CAT)
        assert (first.step_type, first.reward, first.discount) == ("FIRST", None, None)
        assert "twenty questions" in str(first.observation.system_prompt)
        assert last_said(first) == "I have thought of something. Ask your first question. (20 left)"
        second = await env.step(say("Is it alive?"))
        assert (second.step_type, second.reward, second.discount) == ("MID", 0.0, 1.0)
        assert last_said(second) == "Yes. (19 left)"
        with pytest.raises(TypeError, match="got NoneType"):
            await env.step(None)  # type: ignore[arg-type]
        assert last_said(await env.step(say("Can it fly?"))) == "No. (18 left)"
        assert last_said(await env.step(say("Is it blue?"))) == "I don't know. (17 left)"
        assert last_said(await env.step(say("Guess: dog"))) == "No, that is not it. (16 left)"
        unusable = await env.step(say("Is it a cat? Or is it a dog?"))
        assert "several questions or guesses" in last_said(unusable)
        assert [message["role"] for message in unusable.observation.messages] == ["user", "assistant"] * 5 + ["user"]
        won = await env.step(say("Is it a kitten?"))
        assert (won.step_type, won.reward, won.discount, won.observation) == ("LAST", 1.0, 0.0, None)
    report = env.report()
    assert (env.step_count, report.truncated_by, report.has_container, report.phase) == (6, None, False, None)
    assert (env.current_task.name, report.rewards, set(report.phase_sec)) == ("cat", {"reward": 1.0}, {"oracle"})
    assert env.time_step is won


async def test_observations_do_not_reveal_the_object() -> None:
    class Chatty(Policy):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            return say("Yes, because a cat is an animal")

    async with game(Chatty()) as env:
        first = await env.reset(options=CAT)
        second = await env.step(say("Is it alive?"))
    assert first.observation.metadata is None
    assert "cat" not in f"{first.observation} {second.observation}"


async def test_game_ends_when_questions_run_out() -> None:
    asked = 0

    class Counting(Policy):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            nonlocal asked
            asked += 1
            return say("no")

    async with game(Counting(), questions=3) as env:
        await env.reset(options=CAT)
        await env.step(say("Is it alive?"))
        await env.step(say(""))
        last = await env.step(say("Is it a plant?"))
    assert (last.step_type, last.reward, last.discount) == ("LAST", 0.0, 1.0)
    report = env.report()
    assert (report.truncated_by, report.rewards, asked) == ("steps", {"reward": 0.0}, 1), "the last answer is unused"


async def test_correct_last_guess_is_termination() -> None:
    async with game(questions=1) as env:
        assert last_said(await env.reset(options=CAT)).endswith("(1 left)")
        last = await env.step(say("Guess: cat"))
    assert (last.reward, last.discount, env.report().truncated_by) == (1.0, 0.0, None)


async def test_run_limits_truncate_with_the_game_reward() -> None:
    for verify, reward in ((True, 0.0), (False, None)):
        limits = EpisodeLimits(tokens=10, verify_on_truncation=verify)
        async with limited(game(verify_on_truncation=verify), limits) as env:
            await env.reset(options=CAT)
            last = await env.step(say("Is it alive?", usage=Usage(8, 2)))
            assert (last.reward, last.discount, env.report().truncated_by) == (reward, 1.0, "tokens")


def test_invalid_games_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one object"):
        TwentyQuestionsEnvironment([], oracle=FACTS)
    with pytest.raises(ConfigError, match="got OraclePolicy, which runs the solutions"):
        game(OraclePolicy())


class Waiting(Policy):
    """An oracle that says when it is asked, and answers when it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return say("yes")


async def test_close_while_oracle_thinks_fails_the_step() -> None:
    oracle = Waiting()
    env = game(oracle)
    await env.reset(options=CAT)
    step = asyncio.create_task(env.step(say("Is it alive?")))
    await oracle.asked.wait()
    assert env.report().phase == "oracle"
    with pytest.raises(EpisodeStateError, match=r"while step\(\) is running"):
        await env.reset()
    await env.close()
    oracle.may_answer.set()
    with pytest.raises(EpisodeStateError, match="was closed"):
        await step
    assert env.time_step is None


async def test_cancelled_step_cancels_the_question() -> None:
    oracle = Waiting()
    env = game(oracle)
    await env.reset(options=CAT)
    step = asyncio.create_task(env.step(say("Is it alive?")))
    await oracle.asked.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert oracle.cancelled
    await env.reset(options=CAT)
    assert (await env.step(say("Guess: cat"))).reward == 1.0


def failing(*answers: Any) -> Policy:
    said = iter(answers)

    class Failing(Policy):
        requests: list[LLMRequest] = []  # noqa: RUF012

        async def __call__(self, request: LLMRequest) -> Any:
            self.requests.append(request)
            answer = next(said)
            if isinstance(answer, Exception):
                raise answer
            return say(answer, usage=Usage(10, 5), cost=0.25, model="m") if isinstance(answer, str) else answer

    return Failing()


async def test_unreadable_oracle_response_is_requested_again(tmp_path: Path) -> None:
    oracle = failing("It is a cat!", "yes")
    async with game(oracle, output_dir=tmp_path / "files") as env:
        await env.reset(options=CAT)
        assert last_said(await env.step(say("Is it alive?"))) == "Yes. (19 left)"
    assert [message["role"] for message in oracle.requests[1].messages] == ["user", "assistant", "user"]
    [line] = map(json.loads, (tmp_path / "files" / "oracle.jsonl").read_text().splitlines())
    assert line.pop("sec") >= 0
    assert line == {
        "task": "cat",
        "question": "Is it alive?",
        "said": ["It is a cat!", "yes"],
        "answer": "yes",
        "model": "m",
        "prompt_tokens": 20,
        "generated_tokens": 10,
        "cost": 0.5,
        "taken_over": False,
    }
    assert env.report().environment_usage == EnvironmentUsage(20, 10, 0.5)


@pytest.mark.parametrize(
    ("oracle", "says"),
    [
        (failing("perhaps", "It is a cat"), "got 'perhaps' and then 'It is a cat'"),
        (
            failing(EndpointTimeoutError("no answer: see policy.timeout_sec")),
            r"EndpointTimeoutError: .* env\.oracle\.timeout_",
        ),
        (
            failing("perhaps", ValueError("x")),
            r"could not answer: ValueError: x \(an earlier response was invalid: expected yes, no or don't know, "
            r"got 'perhaps'\)",
        ),
        (failing(7), "Expected the oracle to return an LLMResponse, got 7"),
        (Waiting(), r"within its limit of 0.05 s. Choose a faster model for `env.oracle`"),
    ],
)
async def test_oracle_failure_is_a_verifier_error(tmp_path: Path, oracle: Any, says: str) -> None:
    collector = MemoryTrajectoryCollector()
    model = oracle_model(oracle)
    model.timeout_sec = 0.05 if isinstance(oracle, Waiting) else None
    env = TrajectoryCollectingEnvironment(game(model, output_dir=tmp_path), collector)
    await env.reset(options=CAT)
    with pytest.raises(OracleResponseError, match=says):
        await env.step(say("Is it alive?"))
    assert env.trajectory.outcome == Outcome.VERIFIER_ERROR
    assert (env.time_step, env.report().rewards) == (None, {})
    assert json.loads((tmp_path / "oracle.jsonl").read_text())["answer"] is None
    with pytest.raises(EpisodeStateError):
        await env.step(say("Is it alive?"))


async def test_oracle_without_replies_for_task_fails() -> None:
    with pytest.raises(OracleResponseError, match=r"env\.oracle\.replies has no replies for task 'cat'"):
        await game(ScriptedPolicy(replies={"dog": ["yes"]})).reset(options=CAT)


async def test_oracle_runs_on_its_opening_loop() -> None:
    loops = []

    class Noting(Policy):
        async def preflight(self) -> None:
            loops.append(asyncio.get_running_loop())

        async def __call__(self, request: LLMRequest) -> LLMResponse:
            loops.append(asyncio.get_running_loop())
            return say("yes")

    oracle = oracle_model(Noting())
    await oracle.open()

    def execute() -> str:
        with wrap_as_gym(game(oracle)) as gym:
            gym.reset(options=CAT)
            observation, *_ = gym.step(say("Is it alive?"))
            return str(observation.messages[-1]["content"])

    assert await asyncio.to_thread(execute) == "Yes. (19 left)"
    assert set(loops) == {asyncio.get_running_loop()}
    assert len(loops) == 2
    await oracle.close()


def test_oracle_works_after_its_opening_loop_closed() -> None:
    oracle = oracle_model(FACTS)
    asyncio.run(oracle.open())

    async def execute() -> str:
        async with game(oracle) as env:
            await env.reset(options=CAT)
            return last_said(await env.step(say("Is it alive?")))

    assert asyncio.run(execute()) == "Yes. (19 left)"


async def test_unready_oracle_is_an_error() -> None:
    class NotReady(Policy):
        async def preflight(self) -> None:
            raise PreflightError("Set policy.model.")

    with pytest.raises(PreflightError, match=r"The oracle \(`env.oracle`\) is not ready. Set env.oracle.model."):
        await oracle_model(NotReady()).open()
