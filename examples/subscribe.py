"""A trainer in 40 lines: complete groups from `rollouts.scored`, with plain aiokafka.
    python examples/subscribe.py BOOTSTRAP_SERVERS [RUN]

Prints one line a complete group while a run goes on, until Ctrl-C.
"""

import asyncio
import json
import sys
from collections import defaultdict

from aiokafka import AIOKafkaConsumer


async def complete_groups(bootstrap: str, run: str | None):
    groups: dict[str, dict[str, dict]] = defaultdict(dict)
    async with AIOKafkaConsumer(
        "rollouts.scored", bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="earliest"
    ) as consumer:
        async for record in consumer:
            headers = {name: value.decode() for name, value in record.headers}
            if run not in (None, headers["run_id"]):
                continue
            group = groups[headers["group_id"]]
            known = group.setdefault(headers["rollout_id"], rollout := json.loads(record.value))
            # One record of an attempt counts: the highest (round, revision), then the first that came.
            if (rollout["round"], rollout["revision"]) > (known["round"], known["revision"]):
                group[headers["rollout_id"]] = rollout
            elif rollout is known and len(group) == int(headers["group_size"]):
                yield headers["group_id"], sorted(group.values(), key=lambda r: r["group"]["index"])


async def main() -> None:
    async for group, rollouts in complete_groups(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None):
        rewards = [rollout["reward"] for rollout in rollouts if not rollout["mask"]["loss"]]
        print(f"{group} {rollouts[0]['environment']}: {len(rollouts)} rollouts, rewards {rewards}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
