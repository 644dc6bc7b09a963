"""A model server whose latency and failures depend on the prompt alone, and which writes down every call.

    python -m tests.chaos.model --journal PATH --max-latency-s 3 --flaky 0.05 [--tool-steps 10]

The journal has one line a call: time of arrival, the first word after `Episode` of the prompt, and the number of the step.
"""

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from rollstream.testing.model_server import Call, Reply, Request, ScriptedModelServer, Slow, Status, Text, ToolCalls

ANSWER = r"\boxed{B}"


def share(prompt: str, salt: str) -> float:
    """Evenly spread over [0, 1), always the same for one prompt."""
    return int.from_bytes(blake2b(f"{salt}/{prompt}".encode(), digest_size=8).digest(), "big") / 2**64


class Script:
    """Answers everything; so many prompts fail their first call. With tool steps, it adds 1 so often before it answers."""

    def __init__(self, max_latency_s: float, flaky: float, journal: TextIO, tool_steps: int = 0) -> None:
        self._tool_steps = tool_steps
        self._max_latency_s = max_latency_s
        self._flaky = flaky
        self._journal = journal
        self._calls: Counter[str] = Counter()

    def __call__(self, request: Request) -> Reply:
        messages = request.body["messages"]
        found = re.search(r"Episode (\S+):", str([message["content"] for message in messages if message["role"] == "user"]))
        episode = found[1] if found else "?"
        step = sum(message["role"] == "assistant" for message in messages)
        self._journal.write(f"{time.time():.6f} {episode} {step}\n")
        self._calls[episode] += 1
        latency_s = share(f"{episode}/{step}" if self._tool_steps else episode, "latency") * self._max_latency_s
        if self._calls[episode] == 1 and share(episode, "flaky") < self._flaky:
            return Slow(Status(500), latency_s)
        if step < self._tool_steps:
            return Slow(ToolCalls([Call("increment_counter", {"count": 1}, f"call-{step}")]), latency_s)
        return Slow(Text(ANSWER), latency_s)


def calls(journal: Path) -> list[tuple[float, str]]:
    """Every call so far: when, and of which episode."""
    return [(at, episode) for at, episode, _ in step_calls(journal)]


def step_calls(journal: Path) -> list[tuple[float, str, int]]:
    """Every call so far: when, of which episode, and for which of its steps."""
    lines = (line.split() for line in journal.read_text().splitlines())
    return [(float(at), episode, int(step)) for at, episode, step in lines]


async def serve(journal: Path, max_latency_s: float, flaky: float, tool_steps: int) -> None:
    with journal.open("a", buffering=1) as out:
        async with ScriptedModelServer(Script(max_latency_s, flaky, out, tool_steps)) as server:
            print(json.dumps({"base_url": server.base_url}), flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--max-latency-s", type=float, default=3.0)
    parser.add_argument("--flaky", type=float, default=0.0)
    parser.add_argument("--tool-steps", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(serve(given.journal, given.max_latency_s, given.flaky, given.tool_steps))
