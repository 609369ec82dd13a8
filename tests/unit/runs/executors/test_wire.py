"""What crosses between a run and its hosts."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

import ares_exp.errors as errors_module
from ares_exp.errors import AresExpError, RefusalError
from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.executors.remote_messages import Failure, RequestDecoder, RequestEncoder

CLASSES = sorted(
    (one for _, one in inspect.getmembers(errors_module, inspect.isclass) if issubclass(one, AresExpError)),
    key=lambda one: one.__name__,
)


def crossed(error: BaseException) -> BaseException:
    return pickle.loads(pickle.dumps(Failure.of(error))).error("a node")  # type: ignore[no-any-return]


def made(kind: type[AresExpError]) -> AresExpError:
    """An instance, whatever the constructor needs."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    needed = {
        one.name: 3 for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is inspect.Parameter.empty
    }
    return kind("what happened", **needed)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_class(kind: type[AresExpError]) -> None:
    error = made(kind)
    arrived = crossed(error)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args) == (str(error), error.args)
    assert {name: value for name, value in vars(arrived).items() if name != "__notes__"} == vars(error)
    assert "a node" in arrived.__notes__[0]


def test_the_attributes_of_an_error_arrive() -> None:
    refusal = RefusalError("no")
    refusal.response = LLMResponse.from_text("I will not.")
    arrived = crossed(refusal)
    assert isinstance(arrived, RefusalError)
    assert arrived.response is not None
    assert arrived.response.text == "I will not."


class Held(Exception):
    """Holds something that cannot be pickled, and takes more than its text."""

    def __init__(self, code: int, *, held: Any) -> None:
        super().__init__(f"code {code}", held)
        self.held = held

    def __str__(self) -> str:
        return str(self.args[0])


def test_an_unpicklable_error_keeps_its_name_and_text() -> None:
    arrived = crossed(Held(7, held=lambda: None))
    assert (type(arrived).__name__, str(arrived)) == ("Held", "code 7")


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError(2, "No such file", "f"), SystemExit(3)])
def test_errors_of_python_arrive(error: BaseException) -> None:
    arrived = crossed(error)
    assert (type(arrived), str(arrived), arrived.args) == (type(error), str(error), error.args)


def turns(length: int, *, conversation: str = "main", text: str = "x" * 1000) -> LLMRequest:
    messages = [{"role": "user", "content": f"{conversation} {number} {text}"} for number in range(length)]
    tools = [{"type": "function", "function": {"name": "bash", "description": text}}]
    return LLMRequest(messages, system_prompt=text, tools=tools, origin=Origin("messages", conversation=conversation))


def test_a_request_is_sent_as_its_difference() -> None:
    encoder, decoder, sizes = RequestEncoder(), RequestDecoder(), []
    for length in range(1, 60):
        conversation = ("main", "side")[length % 2]
        request = turns(length, conversation=conversation)
        bases = dict(decoder.bases)
        encoder.acknowledge(bases)
        sent = pickle.dumps(encoder.encode(request, bases))
        sizes.append(len(sent))
        arrived = decoder.decode(pickle.loads(sent))
        decoder.forget(bases)
        assert arrived == request
        assert arrived.origin == request.origin
    assert max(sizes[2:]) < 4000, "each has two new messages, of 1,000 characters"


def test_a_request_changed_in_the_middle_arrives() -> None:
    encoder, decoder = RequestEncoder(), RequestDecoder()
    first = turns(10)
    decoder.decode(encoder.encode(first, {}))
    compacted = LLMRequest([first.messages[0], {"role": "user", "content": "In short: …"}], temperature=0.5)
    assert decoder.decode(encoder.encode(compacted, dict(decoder.bases))) == compacted


def test_a_lost_request_is_not_a_base() -> None:
    """The other side names what it has; what it has not, nothing is a difference to."""
    encoder, decoder = RequestEncoder(), RequestDecoder()
    encoder.encode(turns(3), {})
    request = turns(4)
    assert decoder.decode(encoder.encode(request, dict(decoder.bases))) == request
