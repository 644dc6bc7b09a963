"""What rollstream and an environment's server say to each other, and its OpenAPI document.

    python -m rollstream.environments.http.contract docs/http-environment.openapi.json

`/seed` and `/step` never get grading data: only `/verify` and `/reference` see a whole row.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue
from pydantic.json_schema import models_json_schema

from schemas.action import Action
from schemas.episode import StopReason
from schemas.session import Submission
from schemas.values import ChatMessage, JsonObject, Reward, Value
from schemas.verdict import StepReward


class SeedRequest(Value):
    task: JsonObject
    """The public fields of a row: those that the settings name, and `messages` and `tools`."""


class SeedLimits(Value):
    """Limits of this task, each of which holds where it is lower than the run's own."""

    episode_timeout_s: float | None = None
    agent_timeout_s: float | None = None
    max_steps: int | None = None
    max_model_tokens: int | None = None
    max_output_bytes: int | None = None


class SeedAnswer(Value):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """What the agent sees first, as OpenAI chat messages."""
    tools: list[JsonObject] = []
    """OpenAI function tools, for the interaction `tools`."""
    interaction: Literal["single_turn", "tools", "conversation", "gymnasium"] = "single_turn"
    state: JsonValue = None
    """Where the world begins. Two seeds of one task give equal states."""
    limits: SeedLimits = SeedLimits()


class StepRequest(Value):
    state: JsonValue
    """As the step before, or the seed, returned it."""
    action: Action
    index: int
    """Of the action, from 0. One may come twice, with the same state, and has the same answer then."""


class StepAnswer(Value):
    state: JsonValue
    observation: str | list[ChatMessage]
    """What the agent sees. What it does wrong is an observation, not an error."""
    reward: Reward | None = None
    done: bool = False
    truncated: bool = False
    info: JsonObject = {}
    components: dict[str, Reward] = {}


class VerifyRequest(Value):
    task: JsonObject
    """The whole row, grading data included."""
    messages: list[ChatMessage]
    submission: Submission
    stop_reason: StopReason
    state: JsonValue
    """How the world ended, by rollstream's own record and not by the agent's word."""
    steps: list[StepReward]


class VerifyAnswer(Value):
    reward: Reward
    success: bool | None = None
    """Null lets the threshold of the settings decide."""
    components: dict[str, Reward] = {}
    diagnostics: JsonObject = {}


class ReferenceRequest(Value):
    task: JsonObject
    """The whole row, grading data included."""


class ReferenceAnswer(Value):
    submission: Submission
    actions: list[Action] = []
    """What the solution does before it hands in."""


class CloseRequest(Value):
    state: JsonValue


class CloseAnswer(Value):
    """An empty object."""


class Problem(Value):
    detail: str
    """One sentence, shown to whoever runs the task."""


CALLS: tuple[tuple[str, type[Value], type[Value], str], ...] = (
    ("/seed", SeedRequest, SeedAnswer, "Accept a task: what the agent sees first. Pure, and without grading data."),
    ("/step", StepRequest, StepAnswer, "Carry out one action; for every interaction but `single_turn`."),
    ("/verify", VerifyRequest, VerifyAnswer, "Score an episode."),
    ("/reference", ReferenceRequest, ReferenceAnswer, "A solution for the harness `oracle`; 404 says that there is none."),
    (
        "/close",
        CloseRequest,
        CloseAnswer,
        "Told when a session is over, perhaps twice, so that a server may let go of what it holds; 404 is fine.",
    ),
)


def openapi() -> JsonObject:
    """The contract as an OpenAPI 3.1 document."""
    every = [model for _, asked, answered, _ in CALLS for model in (asked, answered)] + [Problem]
    refs, schemas = models_json_schema([(model, "validation") for model in every], ref_template="#/components/schemas/{model}")

    def content(model: type[Value]) -> JsonObject:
        return {"content": {"application/json": {"schema": refs[model, "validation"]}}}

    def operation(path: str, asked: type[Value], answered: type[Value], summary: str) -> JsonObject:
        return {
            "summary": summary,
            "operationId": path[1:],
            "requestBody": {"required": True, **content(asked)},
            "responses": {
                "200": {"description": "Done.", **content(answered)},
                "422": {"description": "The task cannot be played or scored; not tried again.", **content(Problem)},
                "default": {
                    "description": "408, 425, 429 and 5xx are tried again, anything else is not. Never a reward of zero.",
                    **content(Problem),
                },
            },
        }

    return {
        "openapi": "3.1.0",
        "info": {
            "title": "An environment of rollstream on a server",
            "version": "1",
            "description": "Every call is a POST of JSON below the `url` of `[environments.http.NAME]`. A server keeps nothing "
            "that it cannot find again from `state`: any call may be repeated. Calls of one session come one after another.",
        },
        "paths": {path: {"post": operation(path, asked, answered, summary)} for path, asked, answered, summary in CALLS},
        "components": {"schemas": schemas.get("$defs", {})},
    }


def rendered() -> str:
    return json.dumps(openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(rendered(), encoding="utf-8")
