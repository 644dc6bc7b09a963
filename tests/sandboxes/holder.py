"""A process that holds boxes until it is killed: `python -m tests.sandboxes.holder COUNT`, settings from the environment."""

import asyncio
import sys
from contextlib import AsyncExitStack

from rollstream.eventlog.connection import installation_of
from rollstream.eventlog.producer import EventProducer
from rollstream.sandboxes import registry
from rollstream.sandboxes.leases import Leases
from rollstream.settings import load_settings
from schemas.sandbox import SandboxHolder, SandboxSpec


async def hold(count: int) -> None:
    settings = load_settings()
    assert settings.bootstrap_servers is not None
    provider = registry.load(settings.sandboxes, "agent")
    installation = await installation_of(settings.bootstrap_servers, settings.kafka)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer, AsyncExitStack() as held:
        leases = Leases(provider, producer, installation=installation, lease_s=settings.sandboxes.lease_seconds)
        for number in range(count):
            holder = SandboxHolder(worker="holder", run="r", session=f"s{number}", consumer_group="holders", fence=1)
            box = await held.enter_async_context(leases.lease(SandboxSpec(memory_mib=64, disk_mib=8), holder))
            await box.exec(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"])
            print(box.id, flush=True)
        print("held", flush=True)
        await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(hold(int(sys.argv[1])))
