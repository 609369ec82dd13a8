"""What failed in a conformance suite, in a few lines each, read from pytest's report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

MAX_CHARS = 600
SHOWN_TESTS = 3
_PLACE = re.compile(r"^(\S+\.py:\d+): ", re.MULTILINE)
_SET_UP = re.compile(r'^failed on (?:setup|teardown) with "(.*)"$', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a test of a suite fails.

    Attributes:
        why: The exception and its message.
        line: The line of code that raised it, or what the suite expected; empty where it is not known.
        place: File and line number; empty where it is not known.
    """

    why: str
    line: str = ""
    place: str = ""

    @classmethod
    def of(cls, case: ElementTree.Element) -> Failure | None:
        """Reads a test case of a report; `None` of one that did not fail."""
        found = next((one for one in (case.find("failure"), case.find("error")) if one is not None), None)
        if found is None:
            return None
        text, message = found.text or "", found.attrib.get("message", "").strip()
        if in_set_up := _SET_UP.match(message):
            message = in_set_up[1]
        marked = [line[1:].strip() for line in text.splitlines() if line.startswith(">")]
        places = _PLACE.findall(text)
        return cls(message[:MAX_CHARS], marked[-1] if marked else "", places[-1] if places else "")


def told(failures: Iterable[tuple[str, Failure]]) -> Iterator[str]:
    """Yields a paragraph for each reason, with the tests that it fails.

    Args:
        failures: What each test says in words, and why it fails.
    """
    tests: dict[Failure, list[str]] = {}
    for test, failure in failures:
        names = tests.setdefault(failure, [])
        if test not in names:
            names.append(test)
    for failure, names in tests.items():
        more = f", and {len(names) - SHOWN_TESTS} more" if len(names) > SHOWN_TESTS else ""
        lines = [f"{', '.join(names[:SHOWN_TESTS])}{more}:", *(f"    {line}" for line in failure.why.splitlines())]
        if failure.line:
            lines.append(f"    in: {failure.line}" + (f"  ({failure.place})" if failure.place else ""))
        yield "\n".join(lines)
