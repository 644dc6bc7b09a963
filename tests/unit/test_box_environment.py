"""A world that is a box: its tools, what they show, and that an action is done once, whoever is asked to, on its host alone."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollstream.environments import registry
from rollstream.environments.boxes import FILE_BYTES, BoxEnvironment, BoxWorld, Earned
from rollstream.environments.protocol import Episode, Services, StepServices, Task, Verdict
from rollstream.eventlog.lanes import fence
from rollstream.sandboxes.held import SessionBoxes
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.local import LocalProvider
from rollstream.sandboxes.protocol import FoundSandbox, Sandbox
from schemas.action import ObservationReturned, ToolCall
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec
from services.env_worker.sessions import OpenSessions, Outside
from services.env_worker.stepping import StepHandler
from services.env_worker.worlds import WorldCache
from tests.unit.test_reaper import Sink
from tests.unit.test_step_handler import Bench, Session, text_of

OPEN = SandboxSpec(cpus=None, memory_mib=None, pids=None, disk_mib=None, network="public")


class BenchWorld(BoxWorld):
    saws: int = 0


class BenchTask(Task):
    goal: int = 0


class WorkbenchEnvironment(BoxEnvironment[BenchTask, BenchWorld]):
    """Earns what it counts: files called `saw`."""

    name: ClassVar[str] = "workbench"
    version: ClassVar[str] = "1"
    task_type = BenchTask
    world_type = BenchWorld

    def begin(self, task: BenchTask) -> BenchWorld:
        return BenchWorld(spec=OPEN.model_copy(update={"files": {"bench/saw": "rusty\n"}}))

    def prompt(self, task: BenchTask) -> list[Any]:
        return [{"role": "user", "content": "Make saws."}]

    async def look(
        self, box: Sandbox, before: BenchWorld, after: BenchWorld, action: ToolCall, services: StepServices
    ) -> Earned:
        after.saws = int((await box.exec(["sh", "-c", "find . -name saw | wc -l"])).stdout.text)
        return Earned(float(after.saws - before.saws), {"saws": float(after.saws)}, {"why": "counted"})

    async def score(self, task: BenchTask, world: BenchWorld, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=float(world.saws))


class LastingProvider(LocalProvider):
    """Its boxes are directories, so another process can go on with one."""

    host_name = "here"

    async def host(self) -> str:
        return self.host_name

    async def attach(self, found: FoundSandbox, spec: SandboxSpec) -> Sandbox:
        box = self.create(found.id, spec, found.tag)
        box._ends_at = asyncio.get_running_loop().time() + spec.ttl_s
        return box


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "workbench", WorkbenchEnvironment)


class Worker:
    """One env_worker of a host: boxes and journals are the host's, and survive it."""

    def __init__(self, bench: Bench, host: Path, provider: LocalProvider | None = None, lease_s: float = 600.0) -> None:
        self.bench, self.host, self.sink = bench, host, Sink()
        leases = Leases(provider or LastingProvider("agent", state_dir=host), self.sink, installation="i", lease_s=lease_s)

        async def leases_of(name: str) -> Leases:
            return leases

        def outside(request: Any) -> Outside:
            holder = SandboxHolder(worker="w", run=request.run, session=request.session, consumer_group="actions")
            return Outside(SessionBoxes(leases_of, "lasting", holder, host / "journals"))

        self.sessions = OpenSessions(8, 5.0, 60.0, outside)
        self.handler = StepHandler(
            bench.tickets, bench.models, bench.published, WorldCache(2**20), self.sessions, 20.0, "env_worker@test:1"
        )

    async def acts(self, session: Session, index: int, receipt: str | None, name: str, **arguments: Any) -> ObservationReturned:
        before = len(self.bench.published.events)
        await self.handler.step(session.asks(index, receipt, name, **arguments), 3)
        (found,) = [one for one in self.bench.published.events[before:] if isinstance(one, ObservationReturned)]
        return found

    def boxes(self) -> list[str]:
        return [name for name in os.listdir(self.host) if name != "journals"]

    def journals(self) -> list[str]:
        return os.listdir(self.host / "journals")


@contextmanager
def under(value: int) -> Iterator[None]:
    """What a worker does in a generation of its consumer group."""
    token = fence.set(value)
    yield
    fence.reset(token)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.models.close()


async def session_of(bench: Bench, index: int = 0) -> Session:
    session = await bench.session(index)
    session.environment = "workbench"
    return session


def kind_of(observed: ObservationReturned) -> str | None:
    assert observed.failure is None or observed.failure.retryable
    return observed.failure and observed.failure.kind


@pytest.fixture
async def worker(bench: Bench, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(bench, tmp_path, LocalProvider("agent", state_dir=tmp_path))
    yield worker
    await worker.sessions.close()
    assert (worker.boxes(), worker.journals()) == ([], [])


# What the tools do.


async def use(worker: Worker, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What the agent sees of calls, one after the other."""
    session, receipt, seen = await session_of(worker.bench), None, []
    for index, (name, arguments) in enumerate(calls):
        observed = await worker.acts(session, index, receipt, name, **arguments)
        assert observed.failure is None, observed.failure
        receipt = observed.receipt
        seen.append(text_of(observed))
    return seen


async def test_a_command_shows_what_it_prints_in_its_order_and_how_it_ended(worker: Worker) -> None:
    failed, quiet, binary = await use(
        worker,
        ("bash", {"command": "cat bench/saw; echo no >&2; echo more; exit 3"}),
        ("bash", {"command": "cd bench; x=1"}),
        ("bash", {"command": r"printf 'caf\351'; pwd | grep -c bench; echo ${x:-unset}"}),
    )
    assert failed == "rusty\nno\nmore\n[exit code 3]"
    assert quiet == "[exit code 0]"
    assert binary == "caf\\xe90\nunset\n[exit code 0]"


async def test_a_command_that_does_not_end_is_killed_with_all_it_started_and_long_output_is_cut(worker: Worker) -> None:
    timed, long = await use(
        worker,
        ("bash", {"command": "echo begun; sleep 100 & sleep 100", "timeout_s": 0.5}),
        ("bash", {"command": "yes | head -c 300000; echo end"}),
    )
    assert timed.startswith("begun\n[no end within 0.5 s")
    assert "[truncated by rollstream: 300004 bytes in all" in long
    assert long.endswith("y\nend\n[exit code 0]")
    assert len(long) <= 10_000


async def test_files_are_read_written_and_changed_and_mistakes_are_told(worker: Worker) -> None:
    seen = await use(
        worker,
        ("write_file", {"path": "new/dir/poem", "content": "one\ntwo\nthree\nÄ\n"}),
        ("read_file", {"path": "new/dir/poem", "first_line": 2, "lines": 2}),
        ("replace_in_file", {"path": "new/dir/poem", "old": "two\nthree", "new": "2"}),
        ("read_file", {"path": "new/dir/poem"}),
        ("replace_in_file", {"path": "new/dir/poem", "old": "n", "new": "m"}),
        ("replace_in_file", {"path": "new/dir/poem", "old": "absent", "new": "m"}),
        ("read_file", {"path": "nowhere"}),
        ("read_file", {"path": "new"}),
        ("write_file", {"path": "new", "content": ""}),
        ("bash", {"command": f"head -c {FILE_BYTES + 1} /dev/zero > zeros; chmod +x new/dir/poem"}),
        ("read_file", {"path": "zeros"}),
        ("write_file", {"path": "new/dir/poem", "content": "x"}),
        ("bash", {"command": "test -x new/dir/poem; cat -- new/dir/poem"}),
        ("bash", {"command": "true", "timeout_s": 10_000}),
        ("bash", {"command": "x" * 200_000}),
    )  # fmt: skip
    assert seen[0] == "new/dir/poem: 17 bytes written"
    assert seen[1] == "two\nthree\n\n[lines 2 to 3 of 4 lines]"
    assert seen[3] == "one\n2\nÄ\n"
    assert seen[4] == "new/dir/poem: replaced"
    assert seen[5] == "error: expected `old` once in new/dir/poem, found it 0 times: copy it from the file"
    assert all(text.startswith("error: ") for text in [*seen[6:9], seen[10], *seen[13:]])
    assert "No such file" in seen[6]
    assert "irectory" in seen[7]
    assert "longer than" in seen[10]
    assert seen[12] == "x\n[exit code 0]"


async def test_every_action_earns_by_how_it_leaves_the_box_and_a_refused_one_nothing(worker: Worker) -> None:
    session = await session_of(worker.bench)
    observed = await worker.acts(session, 0, None, "bash", command="cp bench/saw saw; cp -r bench desk")
    observed = await worker.acts(session, 1, observed.receipt, "bash", wrong="argument")
    observed = await worker.acts(session, 2, observed.receipt, "bash", command="rm saw")
    over = await worker.acts(session, 3, observed.receipt, "submit")
    assert over.done
    assert [(one.index, one.reward) for one in worker.bench.rewards] == [(0, 3.0), (2, -1.0), (3, 0.0)]
    assert worker.bench.rewards[0].components == {"saws": 3.0}
    assert over.receipt is not None
    receipt = await worker.bench.tickets.open_receipt(over.receipt, session.attempt.session)
    assert [step.reward for step in receipt.rewards] == [3.0, None, -1.0, 0.0]
    assert BenchWorld.model_validate_json(receipt.world).saws == 2
    assert (worker.boxes(), worker.journals()) == ([], [])


async def test_a_run_without_a_backend_is_refused_with_a_sentence(bench: Bench) -> None:
    observed = await bench.act((await session_of(bench)).asks(0, None, "submit"))
    assert observed.failure is not None
    assert (observed.failure.kind, "--sandbox" in observed.failure.message) == ("no_sandbox", True)


# Who may act, and how often.

ONCE = "echo x >> marks; cat marks"


async def test_an_action_that_comes_again_in_another_worker_is_done_once_and_shows_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    first, second = Worker(bench, tmp_path), Worker(bench, tmp_path)
    session = await session_of(bench)
    with under(1):
        opened = await first.acts(session, 0, None, "bash", command=ONCE)
        acted = await first.acts(session, 1, opened.receipt, "bash", command=ONCE)
    with under(2):
        # As after `kill -9`, before anything was committed: both come again, and then what follows from the first answers.
        assert text_of(await second.acts(session, 0, None, "bash", command=ONCE)) == text_of(opened)
        assert text_of(await second.acts(session, 1, opened.receipt, "bash", command=ONCE)) == text_of(acted)
        third = await second.acts(session, 2, acted.receipt, "bash", command=ONCE)
        assert text_of(third) == "x\nx\nx\n[exit code 0]"
        assert (await second.acts(session, 3, third.receipt, "submit")).done
    leased = [event for event in (*first.sink.events, *second.sink.events) if isinstance(event, SandboxLeased)]
    assert len({event.sandbox for event in leased}) == 1
    assert {event.holder.fence for event in leased} == {1}
    assert len({event.event_id for event in leased}) == len(leased)
    assert (second.boxes(), second.journals()) == ([], [])


async def test_an_action_that_had_begun_when_its_worker_died_is_not_done_again_and_its_box_is_closed(
    bench: Bench, tmp_path: Path
) -> None:
    first, second = Worker(bench, tmp_path), Worker(bench, tmp_path)
    session = await session_of(bench)
    opened = await first.acts(session, 0, None, "bash", command=ONCE)
    acting = asyncio.create_task(first.acts(session, 1, opened.receipt, "bash", command="touch begun; sleep 100"))
    await until(lambda: bool([*tmp_path.glob("*/workspace/begun")]))
    acting.cancel()
    await asyncio.wait([acting])
    with under(1):
        assert kind_of(await second.acts(session, 1, opened.receipt, "bash", command=ONCE)) == "action_unknown"
    assert (second.boxes(), second.journals()) == ([], [])


async def test_a_worker_that_was_overtaken_neither_acts_in_the_box_nor_closes_it(bench: Bench, tmp_path: Path) -> None:
    zombie, successor = Worker(bench, tmp_path), Worker(bench, tmp_path)
    session = await session_of(bench)
    with under(1):
        opened = await zombie.acts(session, 0, None, "bash", command=ONCE)
    with under(2):
        acted = await successor.acts(session, 1, opened.receipt, "bash", command=ONCE)
    with under(1):
        assert kind_of(await zombie.acts(session, 1, opened.receipt, "bash", command=ONCE)) == "fenced"
    assert len(zombie.sessions) == 0
    with under(2):
        assert text_of(await successor.acts(session, 2, acted.receipt, "bash", command=ONCE)) == "x\nx\nx\n[exit code 0]"
    await successor.sessions.close()


async def test_a_worker_that_stops_leaves_its_box_to_the_next_one(bench: Bench, tmp_path: Path) -> None:
    first, second = Worker(bench, tmp_path), Worker(bench, tmp_path)
    session = await session_of(bench)
    opened = await first.acts(session, 0, None, "bash", command=ONCE)
    await first.sessions.close()
    assert len(first.boxes()) == 1
    acted = await second.acts(session, 1, opened.receipt, "bash", command=ONCE)
    assert text_of(acted) == "x\nx\n[exit code 0]"
    second.sessions.ended(session.attempt.session, "it stands on episodes.completed")
    await until(lambda: not second.boxes() and len(second.sessions) == 0)
    assert [event.how for event in second.sink.events if isinstance(event, SandboxReleased)] == ["closed"]


async def test_a_box_is_served_by_its_host_alone_and_one_that_ends_with_its_process_by_that(
    bench: Bench, tmp_path: Path
) -> None:
    first, session = Worker(bench, tmp_path), await session_of(bench)
    opened = await first.acts(session, 0, None, "bash", command=ONCE)

    class Elsewhere(LastingProvider):
        host_name = "there"

    for other in (
        Worker(bench, tmp_path, Elsewhere("agent", state_dir=tmp_path)),
        Worker(bench, tmp_path, LocalProvider("agent", state_dir=tmp_path)),
        Worker(bench, tmp_path / "data"),
    ):
        assert kind_of(await other.acts(session, 1, opened.receipt, "bash", command=ONCE)) == "world_elsewhere"
    assert text_of(await first.acts(session, 1, opened.receipt, "bash", command=ONCE)) == "x\nx\n[exit code 0]"
    assert (await first.acts(session, 2, bench_receipt(bench), "submit")).done


async def test_the_lease_of_a_box_is_renewed_while_the_agent_thinks_and_no_more_when_it_is_closed(
    bench: Bench, tmp_path: Path
) -> None:
    worker = Worker(bench, tmp_path, lease_s=0.4)
    session = await session_of(bench)
    opened = await worker.acts(session, 0, None, "bash", command=ONCE)
    before = len(worker.sink.events)
    await until(lambda: len(worker.sink.events) >= before + 4)
    assert all(isinstance(event, SandboxLeased) for event in worker.sink.events[before:])
    await worker.acts(session, 1, opened.receipt, "submit")
    told = len(worker.sink.events)
    await asyncio.sleep(1)
    assert len(worker.sink.events) == told


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def bench_receipt(bench: Bench) -> str | None:
    """The receipt of the last action that was done."""
    return [one.receipt for one in bench.published.events if isinstance(one, ObservationReturned) and one.receipt][-1]
