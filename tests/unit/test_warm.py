"""What is kept warm: which specifications a box that waits fits, whose it is by the log, and which providers leases name."""

from datetime import timedelta

import pytest
from pydantic import ValidationError

from rollstream.reaping import OpenLeases
from rollstream.sandboxes.reaper import LeaseBook, survey
from rollstream.sandboxes.warm import fits
from rollstream.settings import WarmSettings
from schemas.sandbox import SandboxHolder, SandboxReleased, SandboxSpec
from tests.events import at, sandbox_leased
from tests.unit.test_reaper import box

WARM = SandboxSpec(image="i", ttl_s=100)


@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        ({}, True),
        ({"env": {"A": "1"}, "files": {"f": "text"}}, True),
        ({"ttl_s": 50}, True),
        ({"ttl_s": 101}, False),
        ({"image": "other"}, False),
        ({"memory_mib": 2048}, False),
        ({"network": "public"}, False),
        ({"user": "root"}, False),
        ({"workdir": "/elsewhere"}, False),
    ],
)
def test_a_box_fits_what_was_decided_when_it_started(asked: dict[str, object], fit: bool) -> None:
    assert fits(WARM, WARM.model_copy(update=asked)) is fit


def test_a_box_with_a_gateway_is_never_kept_warm() -> None:
    with pytest.raises(ValidationError, match="another network for warm sandboxes than gateway"):
        WarmSettings(spec=SandboxSpec(network="gateway"))


def test_a_box_that_was_handed_over_is_judged_by_the_log_and_not_by_its_label() -> None:
    warm = sandbox_leased(session=None)
    warm = warm.model_copy(update={"holder": SandboxHolder(worker="w")})
    session = sandbox_leased().holder
    handed = warm.handed_over(session, 60).model_copy(update={"occurred_at": at(1)})
    found = box(holder=warm.holder)
    taken_over = sandbox_leased("box-2", fence=2)

    for events in ([warm, handed], [handed, warm]):
        (judged,) = survey([found], LeaseBook(events), installation="cluster/", host="here", at=at(2))
        assert (judged.holder, judged.reap) == (session, None)
    (fenced,) = survey([found], LeaseBook([warm, handed, taken_over]), installation="cluster/", host="here", at=at(2))
    (before,) = survey([found], LeaseBook([warm, taken_over]), installation="cluster/", host="here", at=at(2))
    assert (fenced.reap, before.reap) == ("fenced", None)


def test_a_lease_is_never_shorter_for_being_handed_over_and_has_an_id_of_its_own() -> None:
    leased = sandbox_leased(lease_s=1_000_000_000)
    handed = leased.handed_over(SandboxHolder(worker="w", session="other"), 1)
    assert handed.expires_at == leased.expires_at
    assert handed.event_id != leased.event_id
    assert (handed.renewal, handed.holder.session) == (1, "other")


def test_open_leases_name_the_hosts_of_each_provider_of_ones_own_installation() -> None:
    leases = OpenLeases("cluster/")
    released = SandboxReleased.create("box-2", how="closed", by="w", run=None, session=None)
    elsewhere = sandbox_leased("box-3").model_copy(update={"host": "there", "provider": "other"})
    foreign = sandbox_leased("box-4").model_copy(update={"installation": "theirs/"})
    for event in (sandbox_leased(), sandbox_leased("box-2"), released, elsewhere, foreign):
        leases.add(event)
    first = sandbox_leased()
    assert leases.hosts() == {first.provider: {first.host}, "other": {"there"}}
    assert timedelta(0) < first.expires_at - first.occurred_at
