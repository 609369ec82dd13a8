"""Replies of the terminal agent's LLM in XML, the other form of terminus-2: keystrokes stand in it as they are.

It is no XML to a parser: nothing in it is escaped, because models write keystrokes as they would type them. Commands,
errors and warnings are those that Harbor's terminus-2 has for the same reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ares_exp.agents.terminal_reply import DEFAULT_SECONDS, Keys, TerminalReply

_NEEDED = ("analysis", "plan", "commands")
_SECTIONS = (*_NEEDED, "task_complete")
_OPEN, _CLOSE = "<response>", "</response>"
_COMPLETE = re.compile(r"<task_complete>\s*true\s*</task_complete>", re.IGNORECASE)
_DURATION = re.compile(r"""duration\s*=\s*["']([^"']*)["']""")
_UNQUOTED = re.compile(r"""\b(\w+)\s*=\s*([^"'\s>]+)""")
_SINGLE_QUOTED = re.compile(r"\b(\w+)\s*=\s*'([^']*)'")
_ATTRIBUTE = re.compile(r"\b(\w+)\s*=")
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
_WAITING = (
    "Commands section is empty; not taking any action. If you want to wait a specific amount of time please use "
    "`sleep`, but if you're waiting for a command to finish then continue to wait."
)


def read_xml_reply(text: str) -> TerminalReply:
    """Reads a reply."""
    warnings = list(_around(text))
    content = _content(text)
    if not content:
        return TerminalReply(error="No <response> tag found", warnings=tuple(warnings))
    is_complete = _COMPLETE.search(content) is not None
    sections = {name: found for name in _SECTIONS if (found := _section(content, name)) is not None}
    warnings += [f"Missing <{name}> section" for name in _NEEDED if name not in sections]
    warnings += _misplaced(content)
    given = sections.get("commands")
    if given is None and not is_complete:
        return TerminalReply(error="Missing <commands> section", warnings=tuple(warnings))
    if given == "" and not is_complete:
        warnings.append(_WAITING)
    commands = tuple(_commands(given, warnings)) if given else ()
    return TerminalReply(commands, is_complete, warnings=tuple(warnings))


def _around(text: str) -> Iterator[str]:
    start, end = text.find(_OPEN), text.find(_CLOSE)
    if start < 0:
        return
    if text[:start].strip():
        yield "Extra text detected before <response> tag"
    if end >= 0 and text[end + len(_CLOSE) :].strip():
        yield "Extra text detected after </response> tag"
        if (count := text.count(_OPEN)) > 1:
            yield (
                f"IMPORTANT: Only issue one <response> block at a time. You issued {count} and only the first was "
                "executed."
            )


def _content(text: str) -> str:
    """Returns what is within `<response>`; where that is not closed, all that follows."""
    _, _, rest = text.partition(_OPEN)
    return rest.partition(_CLOSE)[0].strip()


def _section(content: str, name: str) -> str | None:
    """Returns what is within the first tag of that name; `None` if there is no such tag."""
    start = content.find(f"<{name}>")
    end = content.find(f"</{name}>", start)
    if start >= 0 and end >= 0:
        return content[start + len(name) + 2 : end].strip()
    return "" if re.search(rf"<{name}\s*/>", content) else None


def _misplaced(content: str) -> Iterator[str]:
    """Warns of sections that are unknown, there twice, or not in the order of the form."""
    for tag in dict.fromkeys(_top_level_tags(content)):
        if tag not in _SECTIONS:
            yield f"Unknown tag found: <{tag}>, expected analysis/plan/commands/task_complete"
    opened = {name: [match.start() for match in re.finditer(rf"<{name}(?:\s|>|/>)", content)] for name in _SECTIONS}
    for name, places in opened.items():
        if len(places) > 1 and name == "commands":
            yield (
                f"IMPORTANT: Only issue one <commands> block at a time. You issued {len(places)} and only the first "
                "was executed."
            )
        elif len(places) > 1:
            yield f"Multiple <{name}> sections found"
    there = [name for name in _NEEDED if opened[name]]
    found = sorted(there, key=lambda name: opened[name][0])
    if found != there:
        yield f"Sections appear in wrong order. Found: {' → '.join(found)}, expected: {' → '.join(there)}"


def _top_level_tags(content: str) -> Iterator[str]:
    """Yields the names of the tags that stand in no other one."""
    depth, start = 0, content.find("<")
    while start >= 0 and (end := content.find(">", start)) >= 0:
        tag = content[start + 1 : end]
        if tag.startswith("/"):
            depth -= 1
        elif not tag.startswith(("!", "?")):
            if depth == 0:
                words = tag.split() if " " in tag else [tag]
                yield (words[0] if words else tag).removesuffix("/")
            depth += not tag.endswith("/")
        start = content.find("<", end)


def _commands(content: str, warnings: list[str]) -> Iterator[Keys]:
    found = list(_keystrokes(content))
    for number, (attributes, keys) in enumerate(found, 1):
        yield Keys(keys, _seconds(attributes, number, warnings))
        if number < len(found) and not keys.endswith("\n"):
            warnings.append(
                f"Command {number} should end with newline when followed by another command. Otherwise the two "
                "commands will be concatenated together on the same line."
            )
    for entity, char in _ENTITIES.items():
        if entity in content:
            warnings.append(
                f"Warning: {entity} is read verbatim and not converted to {char}. NEVER USE {entity}, unless you want "
                "these exact characters to appear directly in the output."
            )
    if "\\r\\n" in content:
        warnings.append("Warning: \\r\\n line endings are not necessary - use \\n instead for simpler output")


def _keystrokes(content: str) -> Iterator[tuple[str, str]]:
    """Yields attributes and content of each `<keystrokes>`, in one pass: a pattern would take long for odd replies."""
    tag, close, place = "<keystrokes", "</keystrokes>", 0
    while (start := content.find(tag, place)) >= 0:
        inner = content.find(">", start)
        end = content.find(close, inner)
        if inner < 0 or end < 0:
            return
        yield content[start + len(tag) : inner], content[inner + 1 : end]
        place = end + len(close)


def _seconds(attributes: str, number: int, warnings: list[str]) -> float:
    """Reads the duration among the attributes of a command."""
    which = f"Command {number}"
    for name, value in _UNQUOTED.findall(attributes):
        warnings.append(f"{which}: Attribute '{name}' value should be quoted: {name}=\"{value}\"")
    for name, value in _SINGLE_QUOTED.findall(attributes):
        warnings.append(f"{which}: Use double quotes for attribute '{name}': {name}=\"{value}\"")
    for name in _ATTRIBUTE.findall(attributes):
        if name != "duration":
            warnings.append(f"{which}: Unknown attribute '{name}' - known attributes are: duration")
    given = _DURATION.search(attributes)
    if given is None:
        warnings.append(f"{which}: Missing duration attribute, using default {DEFAULT_SECONDS}")
        return DEFAULT_SECONDS
    try:
        return float(given[1])
    except ValueError:
        warnings.append(f"{which}: Invalid duration value '{given[1]}', using default {DEFAULT_SECONDS}")
        return DEFAULT_SECONDS
