"""The state of an office, and the statements by which two states are compared. Pure.

Ids, order and the wording's case and spacing make no difference; everything else that can be changed does.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from rollstream.environments.protocol import World
from rollstream.environments.tools import ToolError

T = TypeVar("T")

Folder = Literal["inbox", "sent", "archive", "trash"]
Moment = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}$")]
"""Local time, to the minute."""
_LOOSE = re.compile(r"[\s.,;:!?]+")


class Contact(World):
    name: str
    email: str
    phone: str = ""
    team: str = ""


class Mail(World):
    id: str
    folder: Folder = "inbox"
    sender: str
    to: list[str]
    subject: str
    body: str


class Meeting(World):
    id: str
    title: str
    start: Moment
    end: Moment
    attendees: list[str] = []
    """Addresses of the others."""
    place: str = ""


class Office(World):
    """Everything there is, as the owner of `me` sees it."""

    me: str
    today: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    contacts: list[Contact] = []
    mails: list[Mail] = []
    meetings: list[Meeting] = []
    next_id: int = 100
    """Number of the next mail or meeting."""

    def contact(self, email: str) -> Contact:
        return self._one(self.contacts, "contact", "email", email)

    def mail(self, mail_id: str) -> Mail:
        return self._one(self.mails, "mail", "id", mail_id)

    def meeting(self, meeting_id: str) -> Meeting:
        return self._one(self.meetings, "meeting", "id", meeting_id)

    def new_id(self, kind: str) -> str:
        self.next_id += 1
        return f"{kind}-{self.next_id - 1}"

    def require_free(self, start: str, end: str, but: str | None = None) -> None:
        """Make sure that nothing is in the calendar between two moments.

        Raises:
            ToolError: something is, or they are no stretch of time.
        """
        begins, ends = moment(start), moment(end)
        if begins >= ends:
            raise ToolError(f"expected an end after {start}, found {end}")
        for meeting in self.meetings:
            if meeting.id != but and moment(meeting.start) < ends and begins < moment(meeting.end):
                raise ToolError(f"{meeting.id} ({meeting.title}, {meeting.start} to {meeting.end}) is at that time")

    def _one(self, things: list[T], what: str, key: str, value: str) -> T:
        for thing in things:
            if plain(getattr(thing, key)) == plain(value):
                return thing
        raise ToolError(f"there is no {what} {value[:100]!r}")


def moment(text: str) -> datetime:
    """A moment, as a tool got it.

    Raises:
        ToolError: there is no such time.
    """
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ToolError(f"expected a time such as 2026-03-02T14:30, found {text[:40]!r}") from None


def plain(text: str) -> str:
    """Text in which case, spacing and punctuation make no difference."""
    return _LOOSE.sub(" ", text.casefold()).strip()


def statements(office: Office) -> frozenset[str]:
    """Everything that counts in an office, one statement each."""
    return frozenset(_statements(office))


def _statements(office: Office) -> Iterator[str]:
    for contact in office.contacts:
        fields = (contact.name, contact.email, contact.phone, contact.team)
        yield "contact: " + " | ".join(map(plain, fields))
    copies: dict[str, int] = {}
    for mail in office.mails:
        told = " | ".join([mail.folder, plain(mail.sender), _people(mail.to), plain(mail.subject), plain(mail.body)])
        # The same mail sent twice is not the same as once.
        copies[told] = copies.get(told, 0) + 1
        yield f"mail {copies[told]}: {told}"
    for meeting in office.meetings:
        when = f"{meeting.start} to {meeting.end}"
        yield "meeting: " + " | ".join([plain(meeting.title), when, _people(meeting.attendees), plain(meeting.place)])


def _people(addresses: list[str]) -> str:
    return ", ".join(sorted({plain(address) for address in addresses}))
