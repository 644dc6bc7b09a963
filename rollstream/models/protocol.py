"""What a model server looks like from inside: messages in, one message out, everything else recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rollstream.errors import RollstreamError
from schemas.step import Call
from schemas.values import ChatMessage, JsonObject, Sampling, Usage


class ContextOverflow(RollstreamError):
    """The prompt no longer fits the model's context: an outcome of the episode, not a failure."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a model.

    Attributes:
        message: the answer as an OpenAI chat message, whatever API it came through.
        response: the provider's response as it came; `escaped` when it had to be changed to fit the log.
        model: the id the server says it answered with.
        sampling: what was sent: the model's own settings under those of the call.
        duration_s: from sending (first try) to the last byte.
        attempts: how often the request was sent.
        cost_usd: as told by an agent that made the call by itself.
    """

    message: ChatMessage
    finish_reason: str | None
    usage: Usage
    response: JsonObject
    model: str
    sampling: Sampling
    started_at: datetime
    duration_s: float
    attempts: int
    escaped: bool
    cost_usd: float | None = None

    def as_call(self, turn: int) -> Call:
        """What events tell of it beside the answer itself; `turn` is the number of calls before it."""
        return Call(
            turn=turn,
            model=self.model,
            finish_reason=self.finish_reason,
            usage=self.usage,
            sampling=self.sampling,
            started_at=self.started_at,
            duration_s=self.duration_s,
            attempts=self.attempts,
            cost_usd=self.cost_usd,
        )


class ModelClient(Protocol):
    """One named model."""

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], sampling: Sampling, max_output_bytes: int
    ) -> Completion:
        """Ask for one assistant message.

        Args:
            sampling: non-null values override the model's own settings.
            max_output_bytes: longest text kept of the response; longer ones are cut, with a marker.

        Raises:
            ContextOverflow: the prompt does not fit.
            ModelFailure: everything else that can go wrong; never an answer.
            Refused: this model's API cannot carry what is asked.
        """
        ...
