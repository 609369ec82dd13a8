from typing import Any

from hypothesis import strategies as st

from ares_exp.agents.runtime.journal import (
    CallEntry,
    DoneEntry,
    Entry,
    HostFiles,
    Journal,
    SeedEntry,
    StepEntry,
    UnheardEntry,
)
from ares_exp.containers.activity import CommandRecord
from ares_exp.containers.container import ExecResult, TerminalOutput
from ares_exp.errors import ContainerDiedError, TransferError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage

texts = st.text(max_size=20)  # with lone surrogates, controls, …
numbers = st.floats(0, 1e9).map(lambda number: round(number, 6))
counts = st.integers(0, 10**9)
results = st.builds(
    ExecResult,
    output=texts,
    exit_code=st.none() | st.integers(0, 255),
    duration_sec=numbers,
    timed_out=st.booleans(),
    elided_bytes=counts,
    stderr=st.none() | texts,
)
responses = st.builds(
    LLMResponse.from_text, texts, cost=numbers, usage=st.builds(Usage, counts, counts), model=st.none() | texts
)
contents = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
errors = st.one_of(
    st.builds(TimeoutError, texts),
    st.builds(ValueError),
    st.builds(KeyError, texts, counts),
    st.builds(FileNotFoundError, st.just(2), texts, texts.filter(bool)),
    st.builds(ContainerDiedError, texts),
    st.builds(TransferError, texts),
)
commands = st.builds(CommandRecord, texts, st.none() | st.integers(0, 255), numbers, st.booleans())
files = st.lists(st.tuples(texts, st.integers(0, 0o777), st.binary(max_size=30)), max_size=3)
OUTCOMES: dict[str, st.SearchStrategy[Any]] = {
    "exec": results,
    "llm": responses,
    "upload": st.text("0123456789abcdef", min_size=4, max_size=4),
    "download": files.map(lambda found: HostFiles(tuple(found))),
    "terminal": st.builds(TerminalOutput, texts, st.booleans()),
    "timer": st.none(),
    "thread": st.none(),
}
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "exec": st.fixed_dictionaries({"command": texts}, optional={"timeout_sec": numbers, "env": st.just({"A": "b"})}),
    "upload": st.fixed_dictionaries({"target": texts}),
    "download": st.fixed_dictionaries({"source": texts}),
    "terminal": st.fixed_dictionaries({"keys": texts, "seconds": numbers, "columns": counts, "lines": counts}),
    "timer": numbers,
    "thread": texts,
}


@st.composite
def journals(draw: st.DrawFn) -> Journal:
    entries: list[Entry] = []
    conversation: list[Any] = []
    waiting: list[CallEntry] = []
    for call_id in range(draw(st.integers(0, 8))):
        kind: Any = draw(st.sampled_from(["llm", *ARGUMENTS]))
        if kind == "llm":
            keep = draw(st.integers(0, len(conversation)))
            conversation = [*conversation[:keep], *draw(st.lists(messages, max_size=3))]
            arguments = LLMRequest(conversation, temperature=draw(st.none() | numbers))
        else:
            arguments = draw(ARGUMENTS[kind])
        entries.append(CallEntry(call_id, kind, arguments))
        waiting.append(entries[-1])
        if kind == "llm" and draw(st.booleans()):
            step = st.builds(
                StepEntry,
                st.just(call_id),
                timestamp=numbers,
                reward=st.none() | numbers,
                policy_sec=st.none() | numbers,
                environment_sec=numbers,
                container_sec=numbers,
                commands=st.lists(commands, max_size=2).map(tuple),
            )
            entries.append(draw(step))
        while waiting and draw(st.booleans()):
            done = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            entries.append(draw(_end(done)))
        if draw(st.integers(0, 9)) == 0:
            entries.append(SeedEntry(draw(st.integers(0, 2**64))))
    return Journal(1_700_000_000.0, 5, entries)


def _end(call: CallEntry) -> st.SearchStrategy[Entry]:
    done = st.builds(DoneEntry, st.just(call.call_id), numbers, OUTCOMES[call.kind])
    failed = st.builds(DoneEntry, st.just(call.call_id), numbers, error=errors)
    if call.kind == "llm":
        return st.one_of(done, failed, st.builds(UnheardEntry, st.just(call.call_id), responses))
    return done if call.kind in ("timer", "thread") else done | failed
