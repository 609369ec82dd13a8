"""The oracle: who knows what is hidden, and answers yes, no or "don't know". An LLM client of the environment's own.

What it says beyond that never leaves this module: it cannot give the hidden object away to the policy, and its tokens
and costs are not the policy's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ares_exp.containers.cancellation import in_thread
from ares_exp.environments.twenty_questions.objects import HiddenObject
from ares_exp.environments.twenty_questions.oracle_prompt import Answer, asked_again, oracle_request, parse_answer
from ares_exp.environments.twenty_questions.oracle_record import MAX_SAID_CHARS, Asked, OracleRecord, readable
from ares_exp.errors import ConfigError, OracleAnswerError, PreflightError, RefusalError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy, as_policy
from ares_exp.recorded_results import is_countable
from ares_exp.results import EnvironmentUsage

TRIES = 2
"""How often one question is put to it: again after an answer that cannot be read."""

SHOWN_CHARS = 200

logger = logging.getLogger(__name__)


class Oracle:
    """Answers the questions of many games, each with an LLM client of its own if the client is a `Policy`.

    It is asked on the event loop where it was opened, whichever loop a game is played on: connections belong to one.
    """

    def __init__(self, client: Policy | LLMClient, *, timeout_sec: float = 300.0) -> None:
        """Asks nothing.

        Args:
            client: What answers. It is opened and closed with this.
            timeout_sec: Bound on one answer in seconds, with everything that is tried for it.

        Raises:
            ConfigError: It cannot answer questions.
        """
        self._policy = as_policy(client)
        if self._policy.needs_solution:
            raise ConfigError(
                f"Expected `env.oracle` to be an LLM client that can answer questions, got {type(client).__name__}, "
                "which plays the solutions of tasks. Set `env.oracle=null` for the one that answers from bundled facts."
            )
        self.timeout_sec = timeout_sec
        self._home: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._calls, self._used = 0, EnvironmentUsage()

    async def open(self) -> None:
        """Checks that it can answer, and has it asked on this event loop from now on.

        Raises:
            PreflightError: It cannot.
        """
        self._home = asyncio.get_running_loop()
        try:
            await self._policy.preflight()
        except PreflightError as error:
            raise PreflightError(f"The oracle (`env.oracle`) is not ready. {_said(error)}") from error

    async def close(self) -> None:
        """Closes the client, and says in the log what it used. Idempotent."""
        await self._policy.close()
        if self._calls:
            logger.info(
                "The oracle was asked %d times: %d prompt tokens, %d generated tokens, %.6g US dollars.",
                *(self._calls, self._used.prompt_tokens, self._used.generated_tokens, self._used.cost),
            )
            self._calls = 0

    def for_game(
        self, hidden: HiddenObject, *, seed: int, on_wait: Callable[[float], None], record: OracleRecord | None
    ) -> GameOracle:
        """What answers the questions of one game, which is played on the running event loop.

        Args:
            hidden: What is hidden.
            seed: Of the game, for a client that samples with it.
            on_wait: Is told, on this loop, of the seconds that the client waits for something else than its answer.
            record: Gets a line for each question, and has the answers that need not be asked for; `None`: neither.

        Raises:
            OracleAnswerError: The client has nothing for that object.
        """
        loop = asyncio.get_running_loop()

        def tell(seconds: float) -> None:
            with suppress(RuntimeError):  # that loop has ended, and the game with it
                loop.call_soon_threadsafe(on_wait, seconds)

        spec = EpisodeSpec(hidden.name, seed=seed, on_wait=tell)
        try:
            client = self._policy.for_episode(spec)
        except Exception as error:
            raise _failed(error) from error
        return GameOracle(self, client, hidden, record)

    async def call(self, client: LLMClient, request: LLMRequest) -> LLMResponse:
        """One answer of a game's client. Raises whatever it raises."""
        home = self._home
        if home is None or home.is_closed() or home is asyncio.get_running_loop():
            response = await client(request)
        else:
            response = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_ask(client, request), home))
        if not isinstance(response, LLMResponse) or not is_countable(response):
            raise OracleAnswerError(f"Expected the oracle to answer with an LLMResponse, got {response!r:.200}.")
        return response

    def count(self, calls: int, used: EnvironmentUsage) -> None:
        """Adds up what the games have used."""
        with self._lock:
            self._calls += calls
            self._used += used


class GameOracle:
    """Answers the questions of one game.

    Attributes:
        used: What was spent on them, without what an earlier try of the game had spent.
    """

    def __init__(self, oracle: Oracle, client: LLMClient, hidden: HiddenObject, record: OracleRecord | None) -> None:
        """See `Oracle.for_game`."""
        self._oracle = oracle
        self._client = client
        self._hidden = hidden
        self._record = record
        self._taken_over: dict[str, list[Answer]] | None = None
        self.used = EnvironmentUsage()

    async def answer(self, question: str) -> Answer:
        """The answer to one question: what an earlier try of the game was told, or the client's.

        Raises:
            OracleAnswerError: The client failed, gave no answer in time, or twice none that can be read.
        """
        if (known := await self._known(question)) is not None:
            return known
        responses: list[LLMResponse] = []
        answer, began = None, time.perf_counter()
        try:
            answer = await self._within_time(question, responses)
        finally:
            await self._write(question, responses, answer, time.perf_counter() - began)
        if answer is None:
            said = " and then ".join(repr(response.text[:SHOWN_CHARS]) for response in responses)
            raise OracleAnswerError(
                f"Expected the oracle to answer with yes, no or don't know, got {said}. Choose another model for "
                "`env.oracle`, or one that answers in fewer words."
            )
        return answer

    async def _within_time(self, question: str, responses: list[LLMResponse]) -> Answer | None:
        limit = asyncio.timeout(self._oracle.timeout_sec)
        try:
            async with limit:
                return await self._tried(question, responses)
        except OracleAnswerError:
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise OracleAnswerError(
                    f"The oracle gave no answer within its limit of {self._oracle.timeout_sec:g} s "
                    "(`env.oracle_timeout_sec`)."
                ) from error
            raise _failed(error) from error

    async def _tried(self, question: str, responses: list[LLMResponse]) -> Answer | None:
        request = oracle_request(self._hidden, question)
        for _ in range(TRIES):
            try:
                response = await self._oracle.call(self._client, request)
            except RefusalError as refusal:
                if refusal.answer is not None:
                    responses.append(refusal.answer)  # it is paid for
                raise
            responses.append(response)
            if (answer := parse_answer(response.text)) is not None:
                return answer
            request = asked_again(request, response.text)
        return None

    async def _known(self, question: str) -> Answer | None:
        """What an earlier try of the game was told, each answer once."""
        if self._record is None:
            return None
        if self._taken_over is None:
            self._taken_over = await asyncio.to_thread(self._record.taken_over, self._hidden.name)
        answers = self._taken_over.get(readable(question))
        return answers.pop(0) if answers else None

    async def _write(self, question: str, responses: list[LLMResponse], answer: Answer | None, sec: float) -> None:
        """Counts what was used, and adds the line of one question to the record."""
        asked = Asked(
            task=self._hidden.name,
            question=readable(question),
            said=tuple(readable(response.text[:MAX_SAID_CHARS]) for response in responses),
            answer=answer.name.lower() if answer is not None else None,
            model=readable(responses[-1].model or "") or None if responses else None,
            prompt_tokens=sum(response.usage.prompt_tokens for response in responses),
            generated_tokens=sum(response.usage.generated_tokens for response in responses),
            cost=sum(response.cost for response in responses),
            sec=sec,
        )
        self.used += asked.usage
        self._oracle.count(len(responses), asked.usage)
        if (record := self._record) is not None:
            await in_thread(lambda: record.append(asked))  # on Ctrl-C, too: it is paid for


async def _ask(client: LLMClient, request: LLMRequest) -> LLMResponse:
    return await client(request)


def _failed(error: BaseException) -> OracleAnswerError:
    return OracleAnswerError(f"The oracle (`env.oracle`) could not answer: {type(error).__name__}: {_said(error)}")


def _said(error: BaseException) -> str:
    """What a policy says of itself, where it is the oracle."""
    return str(error).replace("policy.", "env.oracle.")
