"""The JSON Schema of every event, generated from its class and checked in, so that a changed contract is seen in review.

`python -m schemas.snapshots` writes them. They describe what is written; readers accept more (unknown fields, older versions).
"""

import json
from pathlib import Path

from schemas.envelope import Event

FOLDER = Path(__file__).parent


def render(event: type[Event]) -> str:
    """The schema of one event as it is checked in."""
    schema = event.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind}.json"
