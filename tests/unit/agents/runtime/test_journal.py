import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp import errors
from ares_exp.agents.runtime.journal import (
    MAX_ENTRIES,
    CallEntry,
    CallIdentities,
    DoneEntry,
    Entry,
    HostFiles,
    Journal,
    JournalEncoder,
    RequestPrint,
    decode_journal,
)
from ares_exp.containers.container import ExecResult
from ares_exp.errors import AresExpError, SnapshotMetadataError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from tests.examples import examples
from tests.unit.agents.runtime.journals import journals
from tests.unit.agents.runtime.programs import World, new_journal, on_disk

often = examples(20, suppress_health_check=[HealthCheck.too_slow])


def decoded(lines: list[bytes]) -> Journal:
    return decode_journal(lines, started_at=1.0, seed=2, where="/store/x")


def encoded(*entries: Entry) -> list[bytes]:
    return JournalEncoder().update(Journal(1.0, 2, list(entries)))


@often
@given(journals())
def test_journal_round_trips(journal: Journal) -> None:
    lines = JournalEncoder().update(journal)
    assert all(b"\n" not in line for line in lines)
    again = decoded(lines)
    identities = CallIdentities()
    for was, now in zip(journal.entries, again.entries, strict=True):
        if isinstance(was, CallEntry):
            was = replace(was, arguments=identities.of(was.kind, was.arguments))
        if isinstance(was, DoneEntry) and isinstance(now, DoneEntry) and was.error is not None:
            assert (type(now.error), str(now.error), now.at) == (type(was.error), str(was.error), was.at)
        else:
            assert now == was
    assert JournalEncoder().update(again) == lines


@often
@given(journals(), st.integers(0, 30))
def test_update_encodes_only_new_entries(journal: Journal, cut: int) -> None:
    encoder, growing = JournalEncoder(), Journal(journal.started_at, journal.seed, journal.entries[:cut])
    first = list(encoder.update(growing))
    growing.entries.extend(journal.entries[cut:])
    assert encoder.update(growing)[: len(first)] == first
    assert encoder.lines == JournalEncoder().update(journal)


LINES = encoded(
    CallEntry(0, "exec", {"command": "ls"}),
    DoneEntry(0, 0.5, ExecResult("a\n", 0, 0.1)),
    CallEntry(1, "llm", LLMRequest([{"role": "user", "content": "?"}])),
    DoneEntry(1, 1.0, LLMResponse.from_text("ls")),
    CallEntry(2, "download", {"source": "/a"}),
    DoneEntry(2, 1.5, HostFiles((("", 0o644, b"a"),))),
    CallEntry(3, "upload", {"target": "/a"}),
    DoneEntry(3, 2.0, error=TimeoutError("slow")),
    CallEntry(4, "timer", 0.5),
    DoneEntry(4, 2.5),
)


def test_sample_lines_are_valid() -> None:
    assert len(decoded(LINES).entries) == len(LINES)


@often
@given(st.data())
def test_damaged_lines_are_a_clear_error(data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        line = bytearray(lines[place])
        for _ in range(data.draw(st.integers(1, 4))):
            line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
        lines[place] = bytes(line)
    check_decoding(lines)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@often
@given(st.data())
def test_changed_values_are_a_clear_error(data: st.DataObject) -> None:
    lines = [json.loads(line) for line in LINES]
    for _ in range(data.draw(st.integers(1, 3))):
        target: Any = lines
        while isinstance(target, dict | list) and target:
            key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
            if not isinstance(target[key], dict | list) or data.draw(st.booleans()):
                target[key] = data.draw(JSON)
                break
            target = target[key]
    check_decoding([json.dumps(line).encode() for line in lines])


def check_decoding(lines: list[bytes]) -> None:
    """They are a journal, which can be written again, or there is an error that names place and entry."""
    try:
        journal = decoded(lines)
    except SnapshotMetadataError as error:
        told = str(error)
    else:
        assert len(JournalEncoder().update(journal)) == len(lines)
        return
    assert re.match(r"/store/x: entry \d+ of the journal", told), told


def line(**data: Any) -> bytes:
    return json.dumps(data).encode()


CALL = line(t="call", id=0, k="exec", a={})
ASK = line(t="call", id=0, k="llm", s="x", keep=0, m=["a", "b"])
RESULT = {"output": "", "exit_code": 0, "duration_sec": 0.0, "timed_out": False, "elided_bytes": 0, "stderr": None}
HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "no JSON": ([b"{"], "entry 0"),
    "no object": ([b"[]"], "entry 0"),
    "nested": ([b"[" * 100_000], "entry 0"),
    "a completion without a call": ([line(t="done", id=3, at=0)], "there is no call 3"),
    "twice": ([CALL, CALL], "call number 0 is negative or not unique"),
    "a negative call": ([line(t="call", id=-1, k="exec", a={})], "negative"),
    "a call without a kind": ([line(t="call", id=0, k="eval", a={})], "unknown kind of call 'eval'"),
    "completed twice": ([CALL, *[line(t="done", id=0, at=0, v=RESULT)] * 2], "call 0 is completed twice"),
    "never": ([CALL, line(t="done", id=0, at="later", v=RESULT)], "expected a finite number, got 'later'"),
    "at infinity": ([CALL, b'{"t": "done", "id": 0, "at": Infinity, "v": {}}'], "finite number, got inf"),
    "an invalid result": (
        [CALL, line(t="done", id=0, at=0, v={**RESULT, "exit_code": [1]})],
        r"expected int, got \[1\]",
    ),
    "another result": ([CALL, line(t="done", id=0, at=0, v={**RESULT, "more": 1})], "more"),
    "a class of ours": ([CALL, line(t="done", id=0, at=0, e=["Path", []])], "a known error"),
    "a builtin": ([CALL, line(t="done", id=0, at=0, e=["exec", ["1/0"]])], "a known error"),
    "a signal": ([CALL, line(t="done", id=0, at=0, e=["KeyboardInterrupt", []])], "a known error"),
    "an iteration": ([CALL, line(t="done", id=0, at=0, e=["StopIteration", []])], "a known error"),
    "an error of objects": ([CALL, line(t="done", id=0, at=0, e=["OSError", [{}]])], "with plain values"),
    "more than there is": ([line(t="call", id=0, k="llm", s="x", keep=5, m=[])], "keeps 5 of 0 messages"),
    "a step of a command": ([CALL, line(t="step", id=0, time=0, reward=0, sec=[0, 0, 0])], "a known kind"),
    "a step without times": ([ASK, line(t="step", id=0, time=0, reward=0, sec=[0])], "not enough values"),
    "an unknown entry": ([ASK, line(t="jump", id=0)], "a known kind of entry, got 'jump'"),
    "an odd seed": ([line(t="seed", seed="x")], "expected int"),
    "no base64": ([line(t="call", id=0, k="download", a={}), line(t="done", id=0, at=0, f=[["", 1, "!"]])], "entry 1"),
    "no text": ([b"\xff\xfe"], "entry 0"),
}


@pytest.mark.parametrize(("lines", "told"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_lines_are_refused(lines: list[bytes], told: str) -> None:
    with pytest.raises(SnapshotMetadataError, match=told) as caught:
        decoded(lines)
    assert len(str(caught.value)) < 300


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.agents.runtime.journal.MAX_ENTRIES", 3)
    with pytest.raises(SnapshotMetadataError, match="at most 3 journal entries"):
        decoded([line(t="seed", seed=1)] * 4)
    assert MAX_ENTRIES > 3


def test_expanded_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ares_exp.agents.runtime.journal.MAX_MESSAGES", 100)
    calls = [line(t="call", id=0, k="llm", s="x", keep=0, m=["a"] * 20)]
    calls += [line(t="call", id=number, k="llm", s="x", keep=20, m=[]) for number in range(1, 6)]
    assert len(decoded(calls[:5]).entries) == 5
    with pytest.raises(SnapshotMetadataError, match=r"entry 5 .* 120 messages in all"):
        decoded(calls)


def test_file_modes_are_only_permissions() -> None:
    lines = [line(t="call", id=0, k="download", a={}), line(t="done", id=0, at=0, f=[["", 0o4777, ""]])]
    done = decoded(lines).entries[1]
    assert isinstance(done, DoneEntry)
    assert done.value == HostFiles((("", 0o777, b""),))


PLAIN_ERRORS: list[Exception] = [
    TimeoutError(),
    TimeoutError("too slow"),
    ValueError("a", 1, None, True, 0.5),
    FileNotFoundError(2, "No such file or directory", "/a"),
    PermissionError(13, "Permission denied"),
    ConnectionResetError("by peer"),
    OSError("odd"),
    *(
        kind("what happened")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AresExpError)
    ),
]


@pytest.mark.parametrize("error", PLAIN_ERRORS, ids=repr)
def test_standard_errors_round_trip(error: Exception) -> None:
    [_, done] = decoded(encoded(CallEntry(0, "exec", {}), DoneEntry(0, 1.0, error=error))).entries
    assert isinstance(done, DoneEntry)
    assert (type(done.error), str(done.error)) == (type(error), str(error))


class OwnError(ValueError):
    pass


class OwnContainerError(errors.ContainerError):
    pass


OTHER_ERRORS = [
    OwnError("x"),
    OwnContainerError("x"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
    json.JSONDecodeError("no", "x", 0),
    ValueError(object()),
    TimeoutError(["list"]),
    type("TimeoutError", (Exception,), {})("of the same name"),
]


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=lambda error: type(error).__qualname__)
def test_custom_errors_cannot_be_recorded(error: Exception) -> None:
    with pytest.raises(SnapshotUnsupportedError, match=type(error).__name__):
        encoded(CallEntry(0, "exec", {}), DoneEntry(0, 1.0, error=error))


def test_outcome_without_an_encoding_is_an_error() -> None:
    with pytest.raises(SnapshotUnsupportedError, match="A call of the agent returned a set"):
        encoded(CallEntry(0, "exec", {}), DoneEntry(0, 1.0, {1, 2}))


def test_requests_have_distinct_identities() -> None:
    identities = CallIdentities()
    texts: list[Any] = ["a", "b", ["a"], [{"type": "text", "text": "a"}], "", " "]
    requests = [LLMRequest([{"role": "user", "content": text}]) for text in texts]
    requests += [LLMRequest([{"role": "system", "content": "a"}]), LLMRequest([])]
    requests += [replace(requests[0], temperature=1.0), replace(requests[0], tools=[{"name": "x"}])]
    assert len({identities.of_request(request) for request in requests}) == len(requests)
    assert identities.of_request(replace(requests[0])) == CallIdentities().of_request(requests[0])


async def _speaks_of_it(w: World, secret: str) -> None:
    output = await w.runtime.call("exec", {"command": f"login {secret}"}, lambda: _output(secret))
    await w.ask(f"I see {output.output}")
    await w.exec(f"again {output.output}")


async def _output(secret: str) -> ExecResult:
    return ExecResult(f'the key is {secret} and "{secret}"', exit_code=0, duration_sec=0.0)


@pytest.mark.parametrize("secret", ["s3cr3t-value", 'with "quotes" and \\', "ünïcode-secret"])
async def test_secrets_are_masked_and_still_match(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", secret)
    agent: Callable[[World], Any] = lambda w: _speaks_of_it(w, secret)  # noqa: E731
    world = await World(new_journal()).execute(agent)
    assert world.runtime.journal is not None
    text = b"\n".join(JournalEncoder().update(world.runtime.journal)).decode()
    for spelling in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        assert spelling not in text
    assert "the key is ***" in text
    again = World(on_disk(world.runtime.journal))
    again.runtime.replay(lambda: agent(again), elapsed_sec=1.0)
    assert again.runtime.has_ended


def test_request_fingerprint_is_small() -> None:
    request = LLMRequest([{"role": "user", "content": "x" * 100_000}] * 3, system_prompt="y" * 100_000)
    identity = CallIdentities().of_request(request)
    assert isinstance(identity, RequestPrint)
    assert len(str(identity)) < 300
