"""An office to begin with: a small firm that repairs boats, on a Monday morning. Made up for this project."""

from rollstream.environments.workplace.office import Contact, Mail, Meeting, Office

ME = "nora@kiel-boats.example"


def sample_office() -> Office:
    """A new one, because tools change what they are given."""
    return Office(
        me=ME,
        today="2026-03-02",
        contacts=[
            Contact(name="Nora Lindqvist", email=ME, phone="+49 431 5550 100", team="workshop"),
            Contact(name="Tom Brandt", email="tom@kiel-boats.example", phone="+49 431 5550 101", team="workshop"),
            Contact(name="Aylin Kaya", email="aylin@kiel-boats.example", phone="+49 431 5550 102", team="accounts"),
            Contact(name="Jonas Feld", email="jonas@kiel-boats.example", phone="+49 431 5550 103", team="sales"),
            Contact(name="Mira Sato", email="mira@harbour-office.example", phone="+49 431 5550 900", team="harbour"),
            Contact(name="Paul Okoro", email="paul@sailmakers.example", phone="+49 431 5550 700", team="supplier"),
        ],
        mails=[
            _mail(1, "mira@harbour-office.example", "Berth 14", "The berth is free from Thursday. Please confirm by Tuesday."),
            _mail(2, "paul@sailmakers.example", "Offer: mainsail", "A new mainsail costs 2,400 euros and takes three weeks."),
            _mail(3, "tom@kiel-boats.example", "Crane", "The crane can be had on Wednesday at 10:00, for two hours."),
            _mail(4, "aylin@kiel-boats.example", "Invoice 2026-017", "Invoice 2026-017 to the sailing school is still open."),
            _mail(5, "jonas@kiel-boats.example", "Customer visit", "The Petersens come on Friday at 15:00 to see their boat."),
            _mail(6, "prizes@lucky-wheel.example", "You have won", "Click here for your prize."),
        ],
        meetings=[
            _meeting(1, "Morning round", "2026-03-02T08:30", "2026-03-02T09:00", "tom", "jonas", place="workshop"),
            _meeting(2, "Budget", "2026-03-03T14:00", "2026-03-03T15:00", "aylin", place="room 2"),
            _meeting(3, "Haul-out of the Seeadler", "2026-03-04T13:00", "2026-03-04T15:00", "tom", place="slipway"),
            _meeting(4, "Dentist", "2026-03-06T15:00", "2026-03-06T16:00"),
        ],
    )


def _mail(number: int, sender: str, subject: str, body: str) -> Mail:
    return Mail(id=f"mail-{number}", sender=sender, to=[ME], subject=subject, body=body)


def _meeting(number: int, title: str, start: str, end: str, *colleagues: str, place: str = "") -> Meeting:
    attendees = [f"{name}@kiel-boats.example" for name in colleagues]
    return Meeting(id=f"meeting-{number}", title=title, start=start, end=end, attendees=attendees, place=place)
