"""docs/reference/trajectory.schema.json: the JSON Schema of the file of one episode."""

import inspect
import json
from typing import Any

from pydantic import TypeAdapter

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.results import ErrorInfo
from ares_exp.trajectories.files.episode_file import SCHEMA_VERSION
from ares_exp.trajectories.records import BackgroundRecord, EpisodeTrajectory, StepRecord
from tests.docs_reference.markdown import documented_fields, plain

CLASSES = (EpisodeTrajectory, StepRecord, BackgroundRecord, CommandRecord, ErrorInfo)

ADDS = {
    "description": "What the step adds to the tables of the episode; see ares_exp/trajectories/files/step_encoding.py.",
    "type": "object",
    "properties": {
        "messages": {"description": "New messages.", "type": "array", "items": {"type": "object"}},
        "nodes": {
            "description": "New nodes of the tree of conversations: the parent node (-1: none), and a message.",
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"type": "integer", "minimum": -1}, {"type": "integer", "minimum": 0}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "settings": {
            "description": "New settings of requests: system prompt, tools and sampling parameters.",
            "type": "array",
            "items": {"type": "object"},
        },
    },
}


def trajectory_schema() -> str:
    """Makes the schema of the dataclasses that are recorded, with what the encoding of steps adds."""
    made = TypeAdapter(EpisodeTrajectory).json_schema()
    definitions = made.pop("$defs")
    for kind in CLASSES:
        _describe(definitions.get(kind.__name__, made), kind)
    definitions["StepRecord"]["properties"]["adds"] = ADDS
    version = {"description": "Version of this format.", "const": SCHEMA_VERSION}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "properties": {"schema_version": version, **made["properties"]},
        "required": ["schema_version", *made["required"]],
        "$defs": definitions,
    }
    return json.dumps(schema, indent=2) + "\n"


def _describe(schema: dict[str, Any], kind: type) -> None:
    """Replaces titles that repeat names by what the docstring of the class says."""
    schema["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
    described = {name: text for names, text in documented_fields(kind) for name in names.split(", ")}
    for name, property_ in schema["properties"].items():
        property_.pop("title", None)
        property_.pop("default", None)
        if name in described:
            property_["description"] = plain(described[name]).replace("`None`", "`null`")
