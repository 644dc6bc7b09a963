"""Sessions: the environment's answer to a task."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.action import Action
from schemas.envelope import Headers, SessionEvent, composition_headers
from schemas.sandbox import SandboxSpec
from schemas.values import ChatMessage, Composition, EpisodeLimits, JsonObject, Name, Value

Interaction = Literal["single_turn", "tools", "conversation", "gymnasium", "agent_in_env", "task_folder"]
Placement = Literal["none", "agent_sandboxed", "env_sandboxed", "agent_in_env", "separate"]


class Submission(Value):
    """What the agent hands in: its last message, or an artifact."""

    text: str = ""
    artifact: str | None = None
    """For example a unified diff; or the reference of a blob (`blob.<sha256>.<bytes>`) that holds it, as are long `files`."""
    files: dict[str, str] = {}
    """Path -> text: what the workspace declares as handed in, beside the artifact."""
    left_out: dict[str, str] = {}
    """Path, or `artifact` -> why what was to be handed in is not here."""


class Workspace(Value):
    """What an agent's box holds before the agent comes, beyond its image, and what is taken out of it. Nothing that grades."""

    archive: str | None = None
    """Reference of a blob: a tar file, unpacked into the box's work directory."""
    commands: list[list[str]] = []
    """Run one after the other in the work directory, each an argv; if one fails, the session does."""
    base: str | None = None
    """Git revision in the work directory: the artifact is the difference from it. Null: there is no artifact."""
    files: list[str] = []
    """Paths, relative to the work directory, of text files that are handed in."""


PLACEMENTS_WITH_A_BOX: frozenset[Placement] = frozenset({"agent_sandboxed", "agent_in_env", "separate"})
"""Where agent_worker starts a box for the agent."""


class SessionReady(SessionEvent):
    """A SessionDescriptor: "accepted; here is how to interact". Holds nothing that grades."""

    kind: Literal["SessionReady"] = "SessionReady"
    composition: Composition
    environment_version: Name
    interaction: Interaction = "single_turn"
    placement: Placement = "none"
    sandbox: SandboxSpec | None = None
    """Of the agent's box, for a placement that has one."""
    workspace: Workspace | None = None
    messages: list[ChatMessage]
    """The first observation, as OpenAI chat messages."""
    tools: list[JsonObject] = []
    limits: EpisodeLimits
    ticket: str
    """Sealed: the task's grading data, bound to this session. Carried by the agent side, never opened there."""
    submitted_at: datetime
    """When the task was published; queueing counts from here."""
    failures: Annotated[int, Field(ge=0)] = 0
    """How many sessions of this attempt have failed before, in this round. What was only held back does not count."""
    reference: Submission | None = None
    """The environment's own solution; present only in runs published with the harness `oracle`."""
    reference_actions: list[Action] = []
    """What that solution does before it hands in; likewise."""

    def headers(self) -> Headers:
        return [*super().headers(), *composition_headers(self.composition)]
