import pytest

from ares_exp.containers.shell_channel import BoundedOutput, MarkParser

KEY = "0123456789abcdef"


def mark(word: str) -> bytes:
    return f"\x1e{KEY} {word}\x1e".encode()


STREAM = (
    b"noise" + mark("start") + b"a\x1eb\x1e" + KEY.encode() + b"\x1e\x1e0123\n\xff" + mark("7") + b"late" + mark("end")
)
PARTS = [
    (b"noise", "start"),
    (b"a\x1eb\x1e" + KEY.encode() + b"\x1e\x1e0123\n\xff", "7"),
    (b"late", "end"),
    (b"", None),
]


def parts(chunks: list[bytes]) -> list[tuple[bytes, str | None]]:
    """Everything that a parser yields, output of neighbours without a mark between them joined."""
    parser, found, rest = MarkParser(KEY), [], b""
    for chunk in chunks:
        for output, word in parser.feed(chunk):
            rest += output
            if word is not None:
                found.append((rest, word))
                rest = b""
    return [*found, (rest, None)]


def test_marks_are_found_however_the_stream_is_cut() -> None:
    for size in (1, 2, 3, 7, 19, 20, 1000):
        assert parts([STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == PARTS
    for at in range(len(STREAM)):
        assert parts([STREAM[:at], STREAM[at:]]) == PARTS


def test_output_is_not_held_back() -> None:
    assert list(MarkParser(KEY).feed(b"x" * 100)) == [(b"x" * 100, None)]
    assert list(MarkParser(KEY).feed(b"x\x1enot a mark")) == [(b"x\x1enot a mark", None)]


@pytest.mark.parametrize("limit", [0, 1, 2, 9, 10, 11])
@pytest.mark.parametrize(("length", "chunk"), [(0, 1), (1, 1), (9, 1), (11, 4096), (3000, 1), (300_000, 4096)])
def test_head_and_tail_are_preserved(limit: int, length: int, chunk: int) -> None:
    data = bytes(ord("a") + n % 26 for n in range(length))
    output = BoundedOutput(limit)
    for at in range(0, len(data), chunk):
        output.add(data[at : at + chunk])
    kept = data if len(data) <= limit else data[: (limit + 1) // 2] + data[len(data) - limit // 2 :]
    assert output.text().encode() == kept
    assert output.elided_bytes == len(data) - len(kept)


def test_halves_are_decoded_separately() -> None:
    output = BoundedOutput(4)
    output.add("xé".encode()[:2] + b"middle" + "é!".encode()[1:])
    assert output.text() == "x\ufffd\ufffd!"
