"""The Agent Trajectory Interchange Format, version 1.6, written down from its specification to check documents with.

Source: RFC 0001 of the Harbor project. Fields that it does not name are refused, as its own validator does.
"""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.values import JsonObject


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class ImageSource(Strict):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    path: str


class ContentPart(Strict):
    type: Literal["text", "image"]
    text: str | None = None
    source: ImageSource | None = None

    @model_validator(mode="after")
    def has_what_its_type_says(self) -> Self:
        assert (self.text is not None, self.source is not None) == (self.type == "text", self.type == "image")
        return self


class ToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: JsonObject


class ObservationResult(Strict):
    source_call_id: str | None = None
    content: str | list[ContentPart] | None = None


class Observation(Strict):
    results: list[ObservationResult]


class Metrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: JsonObject | None = None


class Step(Strict):
    step_id: int = Field(ge=1)
    timestamp: datetime | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: str | list[ContentPart]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    extra: JsonObject | None = None

    @model_validator(mode="after")
    def only_agents_call(self) -> Self:
        if self.source != "agent":
            assert self.model_name is self.reasoning_content is self.tool_calls is self.metrics is None
        return self

    @model_validator(mode="after")
    def results_are_of_its_own_calls(self) -> Self:
        known = {call.tool_call_id for call in self.tool_calls or []}
        results = self.observation.results if self.observation else []
        assert {result.source_call_id for result in results if result.source_call_id is not None} <= known
        return self


class Agent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[JsonObject] | None = None
    extra: JsonObject | None = None


class FinalMetrics(Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(default=None, ge=0)
    extra: JsonObject | None = None


class Trajectory(Strict):
    schema_version: Literal["ATIF-v1.6"]
    session_id: str
    agent: Agent
    steps: list[Step] = Field(min_length=1)
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: JsonObject = {}

    @model_validator(mode="after")
    def steps_are_numbered_from_one(self) -> Self:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        return self
