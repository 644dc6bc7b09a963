"""The environment `workplace`: tools that change an office, and a comparison of how it ends with how it should.

How it should end is what the task's reference actions make of the same office. Every statement that they bring about or do away
with is a sub-goal, and whatever else is changed is damage.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, cast

from pydantic import Field

from rollstream.environments.protocol import Episode, Services, StepServices, Task, Verdict, World
from rollstream.environments.tools import ToolEnvironment, ToolError, tool
from rollstream.environments.workplace.office import Contact, Folder, Mail, Meeting, Moment, Office, plain, statements
from rollstream.environments.workplace.sample import sample_office
from rollstream.errors import Refused
from schemas.action import ToolCall
from schemas.session import Submission
from schemas.values import ChatMessage, JsonObject, Value

Given = Annotated[str | None, Field(min_length=1, max_length=300)]
Text = Annotated[str, Field(max_length=20_000)]
Line = Annotated[str, Field(min_length=1, max_length=300)]
People = Annotated[list[Line], Field(max_length=50, description="Mail addresses.")]


class Deed(Value):
    """One call of a reference solution."""

    tool: str
    arguments: JsonObject = {}


class WorkplaceTask(Task):
    """What somebody asks of the agent."""

    instruction: Annotated[str, Field(min_length=1)]
    office: Office | None = None
    """Where it begins; without one, the sample office."""
    deeds: Annotated[list[Deed], Field(min_length=1)]
    """What solves the task."""


class Workplace(World):
    """The office, and what its end is compared with; all of it sealed."""

    office: Office
    begun: list[str]
    """Statements of the beginning, in order, as the next."""
    ended: list[str]
    """Statements of the end that the solution leads to."""

    @property
    def goals(self) -> set[str]:
        """What the solution brings about, and what it does away with."""
        return set(self.begun) ^ set(self.ended)

    def missed(self) -> set[str]:
        """Goals that are not reached now."""
        return self.goals & (set(self.ended) ^ statements(self.office))

    def damage(self) -> set[str]:
        """What was changed that should not have been."""
        return (set(self.ended) ^ statements(self.office)) - self.goals


class WorkplaceEnvironment(ToolEnvironment[WorkplaceTask, Workplace]):
    """Reward 1.0 when the office ends as it should, else 0.0; a step earns its share of the sub-goals that it reaches."""

    name: ClassVar[str] = "workplace"
    version: ClassVar[str] = "1"
    task_type = WorkplaceTask
    example: ClassVar[Mapping[str, object]] = {
        "instruction": "There is spam in the inbox. Put it into the trash, and only it.",
        "deeds": [{"tool": "move_mail", "arguments": {"id": "mail-6", "folder": "trash"}}],
    }
    world_type = Workplace
    public_fields: ClassVar[frozenset[str]] = frozenset({"instruction"})

    def begin(self, task: WorkplaceTask) -> Workplace:
        office = task.office.model_copy(deep=True) if task.office else sample_office()
        begun, ended = sorted(statements(office)), sorted(statements(self._done(office, task)))
        if ended == begun:
            raise Refused("workplace: expected deeds that change the office, found none", kind="invalid_task")
        return Workplace(office=office, begun=begun, ended=ended)

    def prompt(self, task: WorkplaceTask) -> list[ChatMessage]:
        rules = (
            "You work in an office, with tools for mail, calendar and contacts. Do exactly what you are asked and nothing "
            "else; look things up rather than guess. When it is done, say so."
        )
        return [{"role": "system", "content": rules}, {"role": "user", "content": task.instruction}]

    def reference(self, task: WorkplaceTask) -> Submission:
        return Submission(text="It is done.")

    def reference_actions(self, task: WorkplaceTask) -> Sequence[ToolCall]:
        return [
            ToolCall(id=f"reference-{number}", name=deed.tool, arguments=deed.arguments)
            for number, deed in enumerate(task.deeds)
        ]

    def step_reward(self, before: Workplace, after: Workplace, call: ToolCall) -> float:
        return (len(before.missed()) - len(after.missed())) / len(before.goals)

    async def score(self, task: WorkplaceTask, world: Workplace, episode: Episode, services: Services) -> Verdict:
        goals, missed, damage = len(world.goals), len(world.missed()), len(world.damage())
        components = {"goals": 1 - missed / goals, "damage": float(damage)}
        diagnostics = {"goals": goals, "missed": missed, "damage": damage, "actions": len(episode.steps)}
        return Verdict(reward=0.0 if missed or damage else 1.0, components=components, diagnostics=diagnostics)

    def _done(self, office: Office, task: WorkplaceTask) -> Office:
        """The office after the deeds of a task.

        Raises:
            Refused: one of them cannot be done.
        """
        # Any difference does: what the steps earn here is not looked at.
        world = Workplace(office=office, begun=[], ended=[""])
        for call in self.reference_actions(task):
            stepping = self.step(world, call, cast("StepServices", None))
            try:
                # The tools here wait for nothing, so a step is over at once, also where no event loop runs.
                stepping.send(None)
            except StopIteration as over:
                world, result = over.value
            if str(result.observation).startswith("error: "):
                raise Refused(
                    f"workplace: deed {call.name} of the task cannot be done: {result.observation}", kind="invalid_task"
                )
        return world.office

    @tool
    async def find_contacts(self, world: Workplace, query: Line) -> list[Contact]:
        """Find people by a part of their name, address or team."""
        return [one for one in world.office.contacts if _has(query, one.name, one.email, one.team)]

    @tool
    async def add_contact(self, world: Workplace, name: Line, email: Line, phone: Given = None, team: Given = None) -> str:
        """Add somebody to the contacts."""
        if any(plain(one.email) == plain(email) for one in world.office.contacts):
            raise ToolError(f"there is a contact {email!r} already")
        world.office.contacts.append(Contact(name=name, email=email, phone=phone or "", team=team or ""))
        return f"{name} was added"

    @tool
    async def change_contact(self, world: Workplace, email: Line, phone: Given = None, team: Given = None) -> Contact:
        """Change the phone number or the team of a contact; what is not given stays."""
        contact = world.office.contact(email)
        contact.phone = contact.phone if phone is None else phone
        contact.team = contact.team if team is None else team
        return contact

    @tool
    async def list_mails(self, world: Workplace, folder: Folder = "inbox") -> list[dict[str, object]]:
        """List the mails of a folder, without their text."""
        return [one.model_dump(exclude={"body"}) for one in world.office.mails if one.folder == folder]

    @tool
    async def find_mails(self, world: Workplace, query: Line) -> list[dict[str, object]]:
        """Find mails by a part of their sender, subject or text."""
        found = (one for one in world.office.mails if _has(query, one.sender, one.subject, one.body))
        return [one.model_dump(exclude={"body"}) for one in found]

    @tool
    async def read_mail(self, world: Workplace, id: Line) -> Mail:
        """Read a mail."""
        return world.office.mail(id)

    @tool
    async def send_mail(self, world: Workplace, to: Annotated[People, Field(min_length=1)], subject: Line, body: Text) -> str:
        """Send a mail from your own address."""
        if strange := [address for address in to if "@" not in address]:
            raise ToolError(f"expected mail addresses, found {', '.join(strange)[:200]}")
        office = world.office
        sent = Mail(id=office.new_id("mail"), folder="sent", sender=office.me, to=to, subject=subject, body=body)
        office.mails.append(sent)
        return f"sent as {sent.id}"

    @tool
    async def reply(self, world: Workplace, id: Line, body: Text) -> str:
        """Answer a mail; the answer goes to its sender, with the subject `Re: …`."""
        office, mail = world.office, world.office.mail(id)
        subject = mail.subject if mail.subject.startswith("Re: ") else f"Re: {mail.subject}"
        sent = Mail(id=office.new_id("mail"), folder="sent", sender=office.me, to=[mail.sender], subject=subject, body=body)
        office.mails.append(sent)
        return f"sent as {sent.id} to {mail.sender}"

    @tool
    async def move_mail(self, world: Workplace, id: Line, folder: Folder) -> str:
        """Move a mail to another folder."""
        world.office.mail(id).folder = folder
        return f"{id} is in {folder}"

    @tool
    async def list_meetings(
        self, world: Workplace, day: Annotated[str | None, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = None
    ) -> list[Meeting]:
        """List what is in your calendar, on one day or on all."""
        found = [one for one in world.office.meetings if day is None or one.start.startswith(day)]
        return sorted(found, key=lambda one: one.start)

    @tool
    async def book_meeting(
        self,
        world: Workplace,
        title: Line,
        start: Moment,
        end: Moment,
        attendees: People | None = None,
        place: Given = None,
    ) -> str:
        """Put a meeting into your calendar; nothing else may be there at that time. Times are such as 2026-03-02T14:30."""
        office = world.office
        office.require_free(start, end)
        for address in attendees or []:
            office.contact(address)
        meeting = Meeting(
            id=office.new_id("meeting"), title=title, start=start, end=end, attendees=attendees or [], place=place or ""
        )
        office.meetings.append(meeting)
        return f"booked as {meeting.id}"

    @tool
    async def move_meeting(self, world: Workplace, id: Line, start: Moment, end: Moment) -> str:
        """Move a meeting to another time, where nothing else may be."""
        meeting = world.office.meeting(id)
        world.office.require_free(start, end, but=meeting.id)
        meeting.start, meeting.end = start, end
        return f"{meeting.id} is from {start} to {end}"

    @tool
    async def cancel_meeting(self, world: Workplace, id: Line) -> str:
        """Take a meeting out of your calendar."""
        world.office.meetings.remove(world.office.meeting(id))
        return f"{id} is cancelled"

    @tool
    async def today(self, world: Workplace) -> dict[str, str]:
        """Tell what day it is, and your own address."""
        return {"today": world.office.today, "you": world.office.me}


def _has(query: str, *texts: str) -> bool:
    return any(plain(query) in plain(text) for text in texts)
