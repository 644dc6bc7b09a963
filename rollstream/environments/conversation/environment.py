"""The environment `conversation`: the agent's message is the action, the user's next message the observation.

The user is a model in the role `user`, or a script in the task. If it fails, that is nobody's outcome: the session ends without
a score and is tried again.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rollstream.environments.conversation import judging
from rollstream.environments.conversation.dialogue import (
    Fact,
    Said,
    Talk,
    answered,
    heard,
    scripted_reply,
    user_prompt,
)
from rollstream.environments.protocol import Episode, Seeded, Services, StepResult, StepServices, Task, Verdict
from rollstream.errors import EnvironmentFailure
from schemas.action import ToolCall, Utterance
from schemas.session import Submission
from schemas.values import ChatMessage, text_of

ROLE = "user"
MAX_TEXT = 20_000


class ConversationTask(Task):
    """A situation that both sides know, and a user with a goal that only one side knows."""

    scenario: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """What the agent is told: who it is, what it knows, how it should talk."""
    opening: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """What the user says first."""
    persona: Annotated[str, Field(max_length=MAX_TEXT)] = "A person of few words."
    goal: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """What the user wants, known to nobody else."""
    facts: list[Fact] = []
    """What the agent must tell the user."""
    forbidden: list[Fact] = []
    """What it must not say."""
    script: list[str] | None = None
    """What the user says in turn, instead of a model; it thanks when it was told all facts, and gives up at its end."""
    max_turns: Annotated[int, Field(ge=1, le=1_000)] = 10
    """Utterances of the agent."""
    rubric: str | None = None
    """Judged by the model in the role `judge`, if there is one."""
    rubric_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of the judge's score in the reward; the end of the conversation has the rest."""

    @model_validator(mode="after")
    def _can_be_scored(self) -> "ConversationTask":
        if self.script is not None and not self.facts:
            raise ValueError("expected facts to a script, whose user thanks when it was told all of them; found none")
        return self


class ConversationEnvironment:
    """Reward 1.0 when all facts were told, nothing forbidden was said and the user reached the goal; a rubric is mixed in."""

    name: ClassVar[str] = "conversation"
    version: ClassVar[str] = "1"
    task_type = ConversationTask
    example: ClassVar[Mapping[str, object]] = {
        "scenario": "You answer the telephone of a ferry line. The ferry to Aero leaves at 16:40.",
        "opening": "Good morning, when does the ferry to Aero leave?",
        "goal": "Learn when the ferry to Aero leaves.",
        "facts": ["16:40"],
        "script": ["When was that?"],
    }
    world_type = Talk
    public_fields: ClassVar[frozenset[str]] = frozenset({"scenario", "opening"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: ConversationTask) -> Seeded:
        messages: list[ChatMessage] = [
            *(task.messages or []),
            {"role": "system", "content": task.scenario},
            {"role": "user", "content": task.opening},
        ]
        talk = Talk(
            persona=task.persona, goal=task.goal, scenario=task.scenario, facts=task.facts, forbidden=task.forbidden,
            script=task.script, max_turns=task.max_turns, said=[Said(by="user", text=task.opening)],
        )  # fmt: skip
        roles = ({ROLE} if task.script is None else set()) | ({judging.ROLE} if task.rubric else set())
        return Seeded(messages, interaction="conversation", world=talk, roles=frozenset(roles))

    def reference(self, task: ConversationTask) -> Submission | None:
        """None with a model in play: what it says cannot be known before."""
        return Submission(text=_everything(task)) if task.script is not None and not task.rubric else None

    def reference_actions(self, task: ConversationTask) -> Sequence[Utterance]:
        return [Utterance(text=_everything(task))] if self.reference(task) else []

    async def step(self, world: Talk, action: ToolCall | Utterance, services: StepServices) -> tuple[Talk, StepResult]:
        if not isinstance(action, Utterance):
            return world, StepResult("error: there are no tools here; talk to the user")
        talk, new = heard(world, action.text)
        talk, shown = answered(talk, await self._reply(talk, services))
        reward = len(new) / len(talk.facts) if talk.facts else None
        info = {"told": len(talk.told), "facts": len(talk.facts), "ended": talk.ended}
        over = talk.ended in ("goal", "give_up")
        return talk, StepResult(shown, reward=reward, done=over, truncated=talk.ended == "turn_limit", info=info)

    async def verify(self, task: ConversationTask, episode: Episode, services: Services) -> Verdict:
        talk = episode.world
        if not isinstance(talk, Talk):
            message = "conversation: expected how the conversation ended, found nothing"
            raise EnvironmentFailure(message, stage="verification", kind="no_world")
        told = len(talk.told) / len(talk.facts) if talk.facts else 1.0
        end = 1.0 if talk.ended == "goal" and told == 1.0 and not talk.offended else 0.0
        components = {"end": end, "facts": told if talk.turns else 0.0}
        reward = end
        if task.rubric and talk.turns:
            components["rubric"] = await judging.judged(task.rubric, talk.said, services)
            reward = (1 - task.rubric_weight) * end + task.rubric_weight * components["rubric"]
        diagnostics = {"ended": talk.ended or "by the agent", "turns": talk.turns, "forbidden": len(talk.offended)}
        return Verdict(reward=reward, components=components, diagnostics=diagnostics)

    async def _reply(self, talk: Talk, services: StepServices) -> str:
        """What the user says next.

        Raises:
            ModelFailure: the model that plays it failed.
            EnvironmentFailure: it said nothing.
        """
        if talk.script is not None:
            return scripted_reply(talk)
        completion = await services.models.complete(user_prompt(talk), ROLE)
        reply = text_of(completion.message).strip()
        if not reply:
            message = "expected the model in the role user to say something, found nothing"
            raise EnvironmentFailure(message, stage="agent", kind="user_silent", retryable=True)
        return reply


def _everything(task: ConversationTask) -> str:
    """All facts, each in the first of its ways."""
    return " ".join(f"{fact if isinstance(fact, str) else fact[0]}." for fact in task.facts)
