"""Provisioning against a broker that does not do what it is asked."""

import pytest

from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.provisioning import TopicsRefused, describe, ensure
from rollstream.settings import Settings

pytestmark = pytest.mark.kafka


async def test_topics_that_the_broker_refuses_are_an_error_and_not_reported_as_created(settings: Settings) -> None:
    kafka = settings.kafka.model_copy(update={"replication_factor": 3})
    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        with pytest.raises(TopicsRefused, match=r"did not create .*tasks\.in .*replication_factor"):
            await ensure(admin, kafka)
        assert all(state.partitions is None for state in await describe(admin, kafka))
    finally:
        await admin.close()


async def test_topics_that_somebody_else_made_first_are_no_error(settings: Settings) -> None:
    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        first = await ensure(admin, settings.kafka)
        second = await ensure(admin, settings.kafka)
    finally:
        await admin.close()
    assert first.created == second.existing
    assert second.created == []
