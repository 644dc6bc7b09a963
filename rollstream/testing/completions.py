"""Answers of models that are given, not asked for."""

from datetime import UTC, datetime

from rollstream.models.protocol import Completion
from schemas.values import ChatMessage, Sampling, Usage

AT = datetime(2026, 1, 1, tzinfo=UTC)
"""When everything happens that is scripted."""


def scripted(message: ChatMessage, finish_reason: str | None = "stop") -> Completion:
    """An answer as a model server would have given it, of one token for one."""
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        response={},
        model="scripted",
        sampling=Sampling(),
        started_at=AT,
        duration_s=0.0,
        attempts=1,
        escaped=False,
    )
