"""The recorded responses of an episode, which the agent gets again in a resumed run, a replay or a branch.

All three pass recorded responses up to a certain step, and compare each request of the agent with the recorded request.
They choose this step in different ways, and react in different ways to requests that differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.response import LLMResponse
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, conversation_of, deserialize_llm_response
from ares_exp.trajectories.request_diff import Normaliser, RequestComparison, StepComparison


class Exchange(NamedTuple):
    """A request of the agent and its response.

    Attributes:
        request: The request, as `serialize_llm_request` returns it.
        response: The response; `None` if the environment reached its time limit before the response.
        stage: Number of finished stages of the task.
        is_pending: Whether the record ends with this request, so that its response is unknown.
    """

    request: Mapping[str, Any]
    response: LLMResponse | None
    stage: int = 0
    is_pending: bool = False


def responses(exchanges: Iterable[Exchange]) -> list[LLMResponse]:
    """Returns the responses in `exchanges`, without the exchanges that have no response."""
    return [exchange.response for exchange in exchanges if exchange.response is not None]


def recorded_exchanges(episode: EpisodeTrajectory) -> list[Exchange]:
    """Returns the requests of a trajectory and their responses, in order. Does not include background requests."""
    steps: Sequence[StepRecord] = episode.steps
    return [
        Exchange(
            step.observation,
            deserialize_llm_response(after.action) if after is not None and after.action is not None else None,
            is_pending=after is None,
        )
        for step, after in zip_longest(steps, steps[1:])
        if step.observation is not None
    ]


def background_exchanges(episode: EpisodeTrajectory) -> Iterator[Exchange]:
    """Yields the background requests of a trajectory and their responses."""
    unfinished = (episode.unfinished_step,) if episode.unfinished_step is not None else ()
    for step in (*episode.steps, *unfinished):
        for background_request in step.background_requests:
            yield Exchange(background_request.request, deserialize_llm_response(background_request.response))


class RecordedResponses:
    """The recorded responses that the agent has not received yet.

    There is one queue of responses for each conversation of the agent, such as the main conversation or a sub-agent.
    The order of requests can differ each time the agent runs, but not within one conversation.
    """

    def __init__(
        self, exchanges: Iterable[Exchange], *, used: int = 0, normalisers: Sequence[Normaliser] | None = None
    ) -> None:
        """Groups the recorded exchanges by conversation, and skips the first `used` exchanges.

        If `normalisers` is `None`, the built-in normalisers are used.
        """
        self._normalisers = normalisers
        self._comparison = RequestComparison(normalisers)
        self._left: dict[int, Exchange] = {}
        self._conversations: dict[str, deque[int]] = {}
        self._names: dict[str, str] = {}
        for number, exchange in enumerate(exchanges):
            queue = self._conversations.setdefault(conversation_of(exchange.request), deque())
            if number >= used:
                self._left[number] = exchange
                queue.append(number)

    def __bool__(self) -> bool:
        """Returns whether any response is left."""
        return bool(self._left)

    def next_for(self, request: Mapping[str, Any]) -> Exchange | None:
        """Returns the next recorded exchange for the conversation of `request`; `None` if there is none.

        It comes from the recorded conversation with the same name. Without one, it comes from a recorded conversation
        with the same first request. Without both, the first conversation of an agent without tools continues with the
        recorded main conversation, because records rename this conversation to `main`.
        """
        conversation = conversation_of(request)
        if conversation not in self._names:
            taken = set(self._names.values())
            waiting = {
                name: self._left[queue[0]].request
                for name, queue in self._conversations.items()
                if name not in taken and queue
            }
            same = (name for name, recorded in waiting.items() if self.are_same(recorded, request))
            main = waiting.get(MAIN_CONVERSATION)
            has_no_tools = main is not None and not main.get("tools") and not request.get("tools")
            fallback = MAIN_CONVERSATION if has_no_tools and not taken else conversation
            self._names[conversation] = conversation if conversation in self._conversations else next(same, fallback)
        queue = self._conversations.setdefault(self._names[conversation], deque())
        return self._left[queue[0]] if queue else None

    def compare(self, exchange: Exchange, request: Mapping[str, Any], step: int) -> StepComparison:
        """Compares a request with a recorded one. Ignores changes that were found in an earlier request."""
        return self._comparison.compare(step, exchange.request, request)

    def are_same(self, recorded: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        """Returns whether two requests are equal after normalising. Unlike `compare`, ignores no earlier changes."""
        return RequestComparison(self._normalisers).compare(0, recorded, request).is_same

    def use(self, request: Mapping[str, Any]) -> None:
        """Removes the exchange that `next_for(request)` returned."""
        del self._left[self._conversations[self._names[conversation_of(request)]].popleft()]

    def forget(self, request: Mapping[str, Any]) -> list[Exchange]:
        """Removes and returns all remaining exchanges of the request's conversation."""
        queue = self._conversations[self._names[conversation_of(request)]]
        forgotten = [self._left.pop(number) for number in queue]
        queue.clear()
        return forgotten
