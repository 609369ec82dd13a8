"""Trajectories as documents of the Agent Trajectory Interchange Format (ATIF) v1.8, and back.

| here | in the document |
|---|---|
| `system_prompt` | a system step |
| a message of the user | a user step, or the result of the command before it: what the LLM was shown of it |
| a message of a tool | a result of the tool call whose id it has |
| an action | an agent step: text, tool calls, metrics (tokens, cost, token ids, logprobs), `model_name` |
| an assistant's message of no action | an agent step with `is_copied_context` and without LLM call |
| a command | a tool call `bash` of the agent step, unless the LLM made tool calls: those are the calls then |
| `tools` | `agent.tool_definitions` |
| a history that was rewritten | a system step with `extra.context_management`, its observation what was kept |
| all else | `extra.ares_exp` of the document and of the steps |

`extra.ares_exp` of the document has the fields of `EpisodeTrajectory`, the requests' other `settings`, and the `first`
record; of an agent step the fields of the `record`, what else there was of the `action`, and `settings` that changed;
of the step that tells of a rewritten history, that `history` (see `atif_history`). With them a document that was made
here is read back exactly, whatever the agent did; without, and for documents of others, see `atif_foreign`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ares_exp.errors import TrajectoryFormatError
from ares_exp.run_dir import dump_json
from ares_exp.trajectories.atif.foreign import ForeignReader
from ares_exp.trajectories.atif.messages import own
from ares_exp.trajectories.atif.reader import AtifReader
from ares_exp.trajectories.atif.schema import check_atif, validate_atif
from ares_exp.trajectories.atif.writer import OURS_VERSION, AtifWriter
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.line_file import read_lines, read_rest, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory

ATIF_SUFFIX = ".atif.json"


def to_atif(trajectory: EpisodeTrajectory) -> tuple[dict[str, Any], list[str]]:
    """The document of a trajectory, JSON-ready and checked.

    Returns:
        The document, and in a sentence each what ATIF has no field for, so that other readers miss it; empty for an
        agent that only ever appends. The sentences are the document's `notes`, too.
    """
    document, dropped = AtifWriter(trajectory).write()
    check_atif(document)
    return document, dropped


def from_atif(document: Any) -> tuple[EpisodeTrajectory, list[str]]:
    """The trajectory in a parsed document, of whatever version and maker.

    Returns:
        The trajectory, and in a sentence each what of the document it could not hold; empty for one made by `to_atif`.

    Raises:
        TrajectoryFormatError: It is no valid ATIF document, or what `to_atif` put in it is broken.
    """
    validate_atif(document)
    try:
        version = own(document).get("version")
        if version is None:
            return ForeignReader(document).read()
        if type(version) is not int or version != OURS_VERSION:
            raise ValueError(
                f"expected `extra.ares_exp` of version {OURS_VERSION}, got {version!r:.80}: update ares_exp"
            )
        return AtifReader(document).read(), []
    except (OverflowError, *BROKEN) as error:
        raise TrajectoryFormatError(
            f"Expected an ATIF document, got one that is broken: {what_broke(error)}."
        ) from error


def load_atif(path: Path) -> tuple[EpisodeTrajectory, list[str]]:
    """Reads a document's file; see `from_atif`.

    Raises:
        TrajectoryFormatError: The file is missing, no JSON, or no valid document; the message names the path.
    """
    try:
        with read_lines(path) as lines:
            document = json.loads(read_rest(lines))
        return from_atif(document)
    except TrajectoryFormatError as error:
        raise TrajectoryFormatError(f"{path}: {error}") from error
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}.") from error
    except BROKEN as error:
        raise TrajectoryFormatError(f"{path}: {what_broke(error)}.") from error


def write_atif(path: Path, trajectory: EpisodeTrajectory, *, sync: bool = True) -> list[str]:
    """Writes a document's file, which appears whole or not at all; returns what ATIF could not hold."""
    document, dropped = to_atif(trajectory)
    write_lines(path, _lines(document), sync=sync)
    return dropped


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document with a line for each step, for people who look into it."""
    head = {name: value for name, value in document.items() if name != "steps"}
    yield f'{dump_json(head)[:-1]}, "steps": [\n'
    for number, step in enumerate(document["steps"]):
        yield f"{',' if number else ''}{dump_json(step)}\n"
    yield "]}\n"
