"""Models that environments and scorers use themselves, such as an oracle that answers questions or a judge.

Their tokens and cost are counted separately from the policy's tokens and cost. Each answer is written to disk before it
is used. If a run is resumed, its episodes therefore do not pay for the same answer again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ares_exp.cancellation import in_thread
from ares_exp.errors import ConfigError, PreflightError, RefusalError, StorageError, VerifierError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy, as_policy
from ares_exp.records.environment_responses import RECORD, Asked, append_asked, read_asked
from ares_exp.records.recorded_results import is_countable
from ares_exp.records.results import EnvironmentUsage
from ares_exp.records.run_storage import RunStorage

MAX_SAID_CHARS = 2_000
"""Maximum number of characters of a response that are recorded."""
MAX_REPEATED_CHARS = 500
"""Maximum number of characters of an invalid response that are quoted in the next request to the model."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """Functions and texts that determine how the responses to one kind of question are parsed and recorded.

    Attributes:
        parse: Function that parses the text of a response into an answer; returns `None` if the text is invalid.
        expected: Description of a valid response for error messages, such as `yes, no or don't know`.
        again: Message that is sent to the model after an invalid response.
        to_record: Function that converts an answer to the string to record, of at most 2,000 characters.
        from_record: Function that converts a recorded string to an answer; returns `None` if the string is invalid.
        tries: Maximum number of requests per question. After an invalid response, the model is asked again.
    """

    parse: Callable[[str], T | None]
    expected: str
    again: str
    to_record: Callable[[T], str]
    from_record: Callable[[str], T | None]
    tries: int = 2


class ModelsElsewhere(Protocol):
    """A connection to the models in the run's process, for environments in another process, such as on a cluster."""

    def client(self, key: str, spec: EpisodeSpec, files: Path | None) -> LLMClient:
        """Makes an LLM client for one episode, which forwards requests to the model at the config key `key`."""

    async def read(self, files: Path) -> Sequence[Asked] | None:
        """Reads the recorded questions of the episode whose files are in `files`; `None` if there is no record."""

    async def append(self, key: str, files: Path, asked: Asked) -> None:
        """Appends a question and its answer to the record in `files`. Both then survive `kill -9` of any process."""


class OwnModel:
    """A model that the environments or scorers of many episodes share.

    If the LLM client is a `Policy`, each episode gets its own client from it. Network connections belong to one event
    loop. All requests therefore run on the event loop on which `open` was called.

    Attributes:
        policy: The LLM client.
        name: Name in messages, such as `The oracle`.
        key: Config key of the model, such as `env.oracle`.
        timeout_sec: Time limit in seconds of one question, including retries; `None` if the caller enforces a limit.
        error: Class of the error that is raised if the model returns no valid answer.
    """

    def __init__(
        self,
        client: Policy | LLMClient,
        *,
        name: str,
        key: str,
        timeout_sec: float | None = None,
        error: type[VerifierError],
    ) -> None:
        """Creates the model. Raises `ConfigError` if `client` runs the solutions of tasks instead of answering."""
        self.policy = as_policy(client)
        if self.policy.needs_solution:
            raise ConfigError(
                f"Expected `{key}` to be an LLM client that can answer questions, got {type(client).__name__}, which "
                f"runs the solutions of tasks. Set `policy@{key}=openai`."
            )
        self.name, self.key, self.timeout_sec, self.error = name, key, timeout_sec, error
        self._home: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._calls, self._used = 0, EnvironmentUsage()
        self._elsewhere: ModelsElsewhere | None = None
        self._storage: RunStorage | None = None

    def record_in(self, storage: RunStorage) -> None:
        """Makes `storage` write the records of questions.

        After a failed write of `storage`, no request is sent, because its answer could not be recorded.
        """
        self._storage = storage

    def ask_elsewhere(self, elsewhere: ModelsElsewhere) -> None:
        """Makes the run's process send the requests and record the answers. Must be called before `open`."""
        self._elsewhere = elsewhere

    async def open(self) -> None:
        """Checks that the client is ready, or raises `PreflightError`. Requests will run on the caller's event loop."""
        self._home = asyncio.get_running_loop()
        if self._elsewhere is not None:
            return
        try:
            await self.policy.preflight()
        except PreflightError as error:
            raise PreflightError(f"{self.name} (`{self.key}`) is not ready. {self.message(error)}") from error

    async def close(self) -> None:
        """Closes the client, and logs its usage. Idempotent."""
        await self.policy.close()
        if self._calls:
            used = self._used
            logger.info(
                "%s received %d requests: %d prompt tokens, %d generated tokens, %.6g US dollars.",
                *(self.name, self._calls, used.prompt_tokens, used.generated_tokens, used.cost),
            )
            self._calls = 0

    def for_episode(
        self, task_name: str, *, seed: int, attempt: int = 0, files: Path | None, scorer: str | None = None
    ) -> EpisodeModel:
        """Returns the model for one episode, with its own LLM client and its own record of questions.

        Args:
            task_name: Name of the task.
            seed: Seed of the episode, for clients that use it for sampling.
            attempt: Number of the attempt at the task, from 0.
            files: Directory for the record of questions (see `ares_exp.records.environment_responses`). With `None`,
                questions are not recorded.
            scorer: Name of the scorer that asks the questions; `None` if the environment asks them.

        Raises:
            VerifierError: The client does not support this task.
        """
        spec = EpisodeSpec(task_name, attempt, seed)
        try:
            if self._elsewhere is not None:
                client = self._elsewhere.client(self.key, spec, files)
            else:
                client = self.policy.for_episode(spec)
        except Exception as error:
            raise self.failed(error) from error
        return EpisodeModel(self, client, task_name, files, scorer)

    async def read_asked(self, files: Path) -> Sequence[Asked] | None:
        """Reads the questions to the model and its answers that are recorded in `files`; `None` without a record."""
        if self._elsewhere is not None:
            return await self._elsewhere.read(files)
        return await asyncio.to_thread(read_asked, files)

    async def append_asked(self, files: Path, asked: Asked) -> None:
        """Appends a question to the model and its answer to the record in `files`.

        The answer was paid for, so the write is completed even if the caller is cancelled, for example by Ctrl-C.

        Raises:
            StorageError: The question could not be written. The run then ends.
            OSError: The question could not be written, outside of a run.
        """
        if self._elsewhere is not None:
            await self._elsewhere.append(self.key, files, asked)
        else:
            await in_thread(lambda: self._append(files, asked))

    def _append(self, files: Path, asked: Asked) -> None:
        if self._storage is None:
            append_asked(files, [asked])
        else:
            self._storage.write(lambda: append_asked(files, [asked]), files / RECORD)

    async def call(self, client: LLMClient, request: LLMRequest) -> LLMResponse:
        """Sends a request with `client`, the LLM client of one episode, on the event loop of the model.

        Exceptions from the client propagate.

        Raises:
            StorageError: The run has already failed to write a record, so the request was not sent.
        """
        if self._storage is not None:
            self._storage.check()

        async def ask() -> LLMResponse:
            return await client(request)

        home = self._home
        if home is None or home.is_closed() or home is asyncio.get_running_loop():
            response = await ask()
        else:
            response = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), home))
        if not isinstance(response, LLMResponse) or not is_countable(response):
            raise self.error(f"Expected {self._named} to return an LLMResponse, got {response!r:.200}.")
        return response

    def count(self, calls: int, used: EnvironmentUsage) -> None:
        """Adds the requests (`calls`) and the usage of a question to the totals that `close` logs. Thread-safe."""
        with self._lock:
            self._calls, self._used = self._calls + calls, self._used + used

    def failed(self, error: BaseException, *, expected: str = "", unread: str | None = None) -> VerifierError:
        """Creates the error for an exception from the client. `unread` is an earlier, invalid response, or `None`."""
        why = "" if unread is None else f" (an earlier response was invalid: expected {expected}, got {unread[:200]!r})"
        message = f"{type(error).__name__}: {self.message(error)}"
        return self.error(f"{self.name} (`{self.key}`) could not answer: {message}{why}")

    def unreadable(self, expected: str, said: list[str]) -> VerifierError:
        """Creates the error for a question without a valid response. `said` contains the texts of its responses."""
        texts = " and then ".join(repr(text[:200]) for text in said)
        return self.error(
            f"Expected {self._named} to respond with {expected}, got {texts}. Choose another model for `{self.key}`, "
            "for example one with shorter responses."
        )

    def message(self, error: BaseException) -> str:
        """Returns the message of an error, in which config keys such as `policy.model` become `env.oracle.model`."""
        return str(error).replace("policy.", f"{self.key}.")

    @property
    def _named(self) -> str:
        return f"{self.name[0].lower()}{self.name[1:]}"


class EpisodeModel:
    """An `OwnModel` as one episode uses it, with the episode's own LLM client and record of questions.

    Attributes:
        used: Tokens and cost of the questions that this object sent to the model.
    """

    def __init__(
        self, model: OwnModel, client: LLMClient, task_name: str, files: Path | None, scorer: str | None
    ) -> None:
        self._model, self._client, self._task, self._files, self._scorer = model, client, task_name, files, scorer
        self._taken_over: dict[str, list[str]] | None = None
        self.used = EnvironmentUsage()

    async def ask(self, question: str, request: LLMRequest, reading: Reading[T]) -> T:
        """Sends `request` to the model, and records and returns its answer.

        `question` identifies the question in the record. If this episode continues an earlier episode that recorded an
        answer to the question, returns the recorded answer without a request.

        Raises:
            VerifierError: The client failed, timed out, or returned no valid response.
            StorageError: The answer could not be recorded. The run then ends.
            OSError: The answer could not be recorded, outside of a run.
        """
        question = writable(question)
        if (known := await self._known(question, reading)) is not None:
            return known
        responses: list[LLMResponse] = []
        llm_response, started = None, time.perf_counter()
        try:
            async with asyncio.timeout(self._model.timeout_sec) as limit:
                llm_response = await self._ask(request, reading, responses)
        except (self._model.error, StorageError):
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise self._model.error(
                    f"{self._model.name} did not respond within its limit of {self._model.timeout_sec:g} s. Choose a "
                    f"faster model for `{self._model.key}`."
                ) from error
            unread = responses[-1].text if responses and not isinstance(error, RefusalError) else None
            raise self._model.failed(error, expected=reading.expected, unread=unread) from error
        finally:
            recorded = reading.to_record(llm_response) if llm_response is not None else None
            try:
                await self._write(question, responses, recorded, time.perf_counter() - started)
            except (OSError, StorageError) as error:
                if llm_response is not None:
                    raise
                logger.debug("The record of a question could not be written: %s", error)
        if llm_response is None:
            raise self._model.unreadable(reading.expected, [response.text for response in responses])
        return llm_response

    async def _ask(self, request: LLMRequest, reading: Reading[T], responses: list[LLMResponse]) -> T | None:
        for _ in range(reading.tries):
            try:
                response = await self._model.call(self._client, request)
            except RefusalError as refusal:
                if refusal.response is not None:
                    responses.append(refusal.response)  # it was paid for
                raise
            responses.append(response)
            if (llm_response := reading.parse(response.text)) is not None:
                return llm_response
            said = {"role": "assistant", "content": response.text[:MAX_REPEATED_CHARS]}
            messages = [*request.messages, said, {"role": "user", "content": reading.again}]
            request = LLMRequest(messages, system_prompt=request.system_prompt)
        return None

    async def _known(self, question: str, reading: Reading[T]) -> T | None:
        """Returns an answer that an earlier episode recorded for this question; `None` if no answer is left.

        Each recorded answer is returned only once. If a question is asked twice, it may get two different answers.
        """
        files = self._files
        if files is None:
            return None
        if self._taken_over is None:
            self._taken_over = {}
            for one in await self._model.read_asked(files) or ():
                is_ours = one.taken_over and one.task == self._task and one.scorer == self._scorer
                if is_ours and one.answer is not None and reading.from_record(one.answer) is not None:
                    self._taken_over.setdefault(one.question, []).append(one.answer)
        answers = self._taken_over.get(question)
        return reading.from_record(answers.pop(0)) if answers else None

    async def _write(self, question: str, responses: list[LLMResponse], llm_response: str | None, sec: float) -> None:
        asked = Asked(
            task=self._task,
            question=question,
            said=tuple(writable(response.text[:MAX_SAID_CHARS]) for response in responses),
            answer=llm_response,
            model=writable(responses[-1].model or "") or None if responses else None,
            prompt_tokens=sum(response.usage.prompt_tokens for response in responses),
            generated_tokens=sum(response.usage.generated_tokens for response in responses),
            cost=sum(response.cost for response in responses),
            sec=sec,
            scorer=self._scorer,
        )
        self.used += asked.usage
        self._model.count(len(responses), asked.usage)
        if (files := self._files) is not None:
            await self._model.append_asked(files, asked)


_REASONING = re.compile(r"\A\s*<think(?:ing)?>.*</think(?:ing)?>", re.S | re.I)


def without_reasoning(text: str) -> str:
    """Removes a model's reasoning (`<think>…</think>` or `<thinking>…</thinking>`) from the start of its text."""
    return _REASONING.sub("", text)


def writable(text: str) -> str:
    """Replaces lone surrogates with `?`, because a model may generate them, but UTF-8 files cannot contain them."""
    return text.encode(errors="replace").decode()
