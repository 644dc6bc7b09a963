"""Pools: who serves what, where a new one begins, what waits for one that nobody serves, and what may be published for it."""

from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import UnknownMemberIdError
from hypothesis import given, strategies as st

from rollstream.admission import Admission
from rollstream.backends import Backends
from rollstream.cli.doctor import pool_checks
from rollstream.cli.pools import PoolsOfRun, nobody_serves, unserved
from rollstream.cli.watch import notices
from rollstream.errors import BrokerUnavailable, Refused, UsageError
from rollstream.eventlog.backlog import Backlog, Tally
from rollstream.eventlog.commits import Commit
from rollstream.eventlog.groups import CONSUMPTIONS, Consumption, Done, GroupState, consumptions_of, group_name, worker_for
from rollstream.eventlog.handover import Handover
from rollstream.eventlog.offsets import NO_MEMBER, Membership
from rollstream.eventlog.pools import Pools, Work
from rollstream.ledger import Ledger, owning
from rollstream.settings import DEFAULT_POOL, Defaults, KafkaSettings, PoolSettings, Settings, load_settings
from schemas.envelope import header_map
from schemas.values import Composition
from tests.events import COMPOSITION, Attempt, Log, run_published, task_submitted
from tests.unit.test_cli_progress import after
from topics.catalogue import CATALOGUE, ROLLOUTS_RETRIES, SESSIONS_READY, TASKS_IN

GPU = {"gpu": {"environments": ["swe"]}}
SWE = task_submitted("swe-1", environment="swe", attempts=2)
MATH = task_submitted("math-1")


def pools(**claims: dict[str, list[str]]) -> Pools:
    return Pools.of(Settings(pools=claims))  # type: ignore[arg-type]


# Settings.


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[pools.gpu]", "setting pools.gpu: expected a pool to name one of environments, harnesses, sandboxes, found none"),
        ("[pools.gpu]\nenvironments = []", "found none: it would serve nothing of its own"),
        ("[pools.gpu]\nenvironments = ['a', 'a']", "expected every name once in a pool, found a twice"),
        (
            "[pools.gpu]\nenvironments = ['a']\n[pools.cpu]\nenvironments = ['b', 'a']",
            "setting pools: expected one pool to claim a, found cpu and gpu claiming it for the same work",
        ),
        ("[pools.b]\nharnesses = ['h']\n[pools.a]\nharnesses = ['h']\nenvironments = ['e']", "claim h, found a and b"),
        ("[pools.default]\nenvironments = ['a']", "expected another name for a pool than default"),
        ("[pools.retries]\nenvironments = ['a']", "expected another name for a pool than retries"),
        ("[pools.actions]\nenvironments = ['a']", "expected another name for a pool than actions"),
        ("[pools.GPU]\nenvironments = ['a']", "pools.GPU"),
        ("[pools.gpu]\nenvironment = ['a']", "there is no such setting"),
        ("pool = 'gpu'\n[pools.cpu]\nenvironments = ['a']", "expected one of the pools default, cpu, found 'gpu'"),
    ],
)
def test_settings_that_leave_open_who_serves_what_are_refused_in_one_sentence(
    toml: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollstream.toml").write_text(toml)
    with pytest.raises(UsageError) as refused:
        load_settings()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "Value error" not in str(refused.value)


def test_one_name_in_two_pools_is_fine_where_something_else_keeps_them_apart() -> None:
    found = pools(a={"environments": ["e"], "harnesses": ["x"]}, b={"environments": ["e"], "harnesses": ["y"]})
    assert [found.pool_of(Work("e", harness)) for harness in "xyz"] == ["a", "b", DEFAULT_POOL]


def test_the_pool_of_a_process_is_chosen_by_its_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_POOLS__GPU__ENVIRONMENTS", '["swe"]')
    monkeypatch.setenv("ROLLSTREAM_POOL", "gpu")
    settings = load_settings()
    assert (settings.pool, settings.pools["gpu"].environments) == ("gpu", ["swe"])
    assert load_settings(pool="default").pool == DEFAULT_POOL


# Who serves what.

NAMES = ("a", "b", "c")
some_names = st.lists(st.sampled_from(NAMES), unique=True, max_size=3)
claims = st.builds(lambda e, h, s: {"environments": e, "harnesses": h, "sandboxes": s}, some_names, some_names, some_names)
declared = st.dictionaries(st.sampled_from(("one", "two", "three")), claims, max_size=3)


@given(declared, st.permutations(("one", "two", "three")))
def test_every_work_belongs_to_exactly_one_pool_and_every_fleet_agrees_which(
    sections: dict[str, dict[str, list[str]]], order: list[str]
) -> None:
    try:
        settings = Settings(pools=sections)  # type: ignore[arg-type]
    except ValueError:
        return  # refused, so no fleet runs with it
    one = Pools.of(settings)
    other = Pools({name: settings.pools[name] for name in order if name in settings.pools})
    for environment, harness, sandbox in product(("a", "b", "c", "d"), ("a", "b", "c", "d"), ("a", "b", "c", None)):
        work = Work(environment, harness, sandbox)
        serving = [name for name in one.names if one.pool_of(work) == name]
        assert len(serving) == 1
        assert other.pool_of(work) == serving[0]
        asked = one.claims_on(work)
        matching = [
            name
            for name, claim in settings.pools.items()
            if (not claim.environments or environment in claim.environments)
            and (not claim.harnesses or harness in claim.harnesses)
            and (not claim.sandboxes or sandbox in claim.sandboxes)
        ]
        assert serving[0] == min(matching, default=DEFAULT_POOL)
        assert (asked is None) == (not matching)


@given(declared)
def test_settings_are_refused_exactly_when_two_pools_name_the_same_for_the_same_work(
    sections: dict[str, dict[str, list[str]]],
) -> None:
    def both_serve(one: dict[str, list[str]], other: dict[str, list[str]]) -> bool:
        return all(
            not mine or not theirs or {*mine} & {*theirs} for mine, theirs in zip(one.values(), other.values(), strict=True)
        )

    def share(one: dict[str, list[str]], other: dict[str, list[str]]) -> bool:
        return any({*mine} & {*theirs} for mine, theirs in zip(one.values(), other.values(), strict=True))

    pairs = [(sections[one], sections[other]) for one in sections for other in sections if one < other]
    wrong = any(both_serve(*pair) and share(*pair) for pair in pairs)
    wrong |= any(not any(section.values()) for section in sections.values())
    try:
        Settings(pools=sections)  # type: ignore[arg-type]
    except ValueError:
        assert wrong
    else:
        assert not wrong


def test_the_headers_of_every_record_that_workers_read_say_whose_it_is() -> None:
    found = pools(gpu={"environments": ["swe"], "harnesses": ["chat"]})
    attempt = Attempt(SWE)
    for event in (SWE, attempt.ready(), attempt.completed(), attempt.retry(), attempt.verification_retry()):
        topic = next(topic for topic in CATALOGUE if type(event) in topic.events)
        assert found.told_by(topic, header_map(event.headers())) == "gpu"
    assert found.told_by(TASKS_IN, header_map(MATH.headers())) == DEFAULT_POOL


def test_a_sandbox_is_a_header_where_one_is_asked_for() -> None:
    boxed = SWE.model_copy(update={"composition": COMPOSITION.model_copy(update={"sandbox": "docker"})})
    found = pools(docker={"sandboxes": ["docker"]})
    assert found.told_by(TASKS_IN, header_map(boxed.headers())) == "docker"
    assert found.told_by(TASKS_IN, header_map(SWE.headers())) == DEFAULT_POOL
    assert "sandbox" not in header_map(SWE.headers())


def test_headers_that_others_wrote_on_a_task_do_not_decide_and_what_is_no_task_is_the_default_pools() -> None:
    found = pools(**GPU)
    for headers in ({}, {"environment": "swe"}, {"environment": "swe", "harness": "chat"}, {"ce_type": "TaskSubmitted"}):
        assert found.told_by(TASKS_IN, headers) is None
        assert found.of_task(headers, SWE) == "gpu"
        assert found.of_task(headers, MATH) == DEFAULT_POOL
        assert found.of_task(headers, None) == DEFAULT_POOL
    assert found.of_task(header_map(SWE.headers()), None) == "gpu"


def test_a_record_whose_headers_are_garbage_is_the_default_pools() -> None:
    assert pools(**GPU).told_by(SESSIONS_READY, {"environment": "�"}) == DEFAULT_POOL
    assert pools(**GPU).told_by(SESSIONS_READY, {}) == DEFAULT_POOL


def test_no_two_subscriptions_share_a_consumer_group() -> None:
    names = [group_name(one.worker, one.topic, pool) for pool in ("default", "gpu", "cpu") for one in consumptions_of(pool)]
    assert len(set(names)) == len(names)
    assert group_name("env_worker", TASKS_IN) == "env_worker"
    assert group_name("env_worker", TASKS_IN, "gpu") == "env_worker.gpu"
    assert group_name("env_worker", ROLLOUTS_RETRIES, "gpu") == "env_worker.gpu.retries"


# Where a new pool begins.

PARTS = [TopicPartition("t", 0), TopicPartition("t", 1)]
HANDOVER = Handover("w", ["w.gpu"], PARTS)
NONE = Commit(-1, "")


class FakeOffsets:
    """Consumer groups: what they have committed, and which of them have members."""

    def __init__(self, groups: dict[str, list[Commit]], active: Collection[str] = ()) -> None:
        self.groups = groups
        self.active = active

    async def read(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        found = self.groups.get(group, [NONE, NONE])
        return {partition: found[partition.partition] for partition in partitions}

    async def commit(self, group: str, membership: Membership, commits: Mapping[TopicPartition, Commit]) -> None:
        assert membership == NO_MEMBER
        if group in self.active:
            raise UnknownMemberIdError
        before = self.groups.get(group, [NONE, NONE])
        self.groups[group] = [commits.get(partition, before[partition.partition]) for partition in PARTS]


async def test_a_new_pool_has_done_what_the_default_pool_had_done() -> None:
    offsets = FakeOffsets({"w": [Commit(7, "beyond"), NONE]})
    await HANDOVER.mark(offsets)
    assert offsets.groups["w.gpu"] == [Commit(7, "beyond"), Commit(0, "")]


async def test_a_pool_that_has_begun_keeps_its_place_whatever_the_default_pool_does() -> None:
    offsets = FakeOffsets({})
    await HANDOVER.mark(offsets)
    offsets.groups["w"] = [Commit(9, ""), Commit(9, "")]
    await HANDOVER.mark(offsets)
    assert offsets.groups["w.gpu"] == [Commit(0, ""), Commit(0, "")]


async def test_a_pool_that_runs_and_has_a_place_is_left_alone_and_one_without_stops_the_start() -> None:
    await HANDOVER.mark(FakeOffsets({"w.gpu": [Commit(3, ""), Commit(4, "")]}, active=["w.gpu"]))
    with pytest.raises(BrokerUnavailable, match=r"cannot say where group w\.gpu begins"):
        await HANDOVER.mark(FakeOffsets({}, active=["w.gpu"]))


async def test_the_place_of_a_pool_is_committed_again_as_it_is_and_no_other_place_is() -> None:
    offsets = FakeOffsets({"w": [Commit(9, ""), Commit(9, "")], "w.gpu": [Commit(3, "x"), NONE]})
    await HANDOVER.keep(offsets)
    assert offsets.groups["w.gpu"] == [Commit(3, "x"), NONE]
    await HANDOVER.keep(FakeOffsets({"w.gpu": [Commit(3, "x"), NONE]}, active=["w.gpu"]))


# What waits.

INSTALLATION = Settings(defaults=Defaults(environment="math"), pools={"gpu": PoolSettings(environments=["swe"])})


def done(pool: str, below: int, beyond: Collection[int] = ()) -> Done:
    return Done({one: {0: (below, frozenset(beyond))} for one in consumptions_of(pool)})


def test_what_waits_for_a_pool_is_its_own_and_not_done() -> None:
    log = Log()
    first, second = Attempt(SWE), Attempt(SWE, index=1)
    records = log.records(
        MATH, SWE, first.ready(), second.ready(), first.retry(), second.verification_retry(), Attempt(MATH).ready()
    )
    records.append(log.raw("tasks.in", b'{"environment": "swe", "question": "q"}'))
    records.append(log.raw("tasks.in", b"no task"))

    def count(done: Done) -> dict[str, int]:
        tally = Tally(["gpu", DEFAULT_POOL], done, owning(INSTALLATION))
        for record in records:
            tally.take(record)
        return dict(tally.counts)

    assert count(Done({})) == {"gpu": 6, DEFAULT_POOL: 3}
    assert count(done("gpu", 1, [1])) == {"gpu": 1, DEFAULT_POOL: 3}
    assert count(done(DEFAULT_POOL, 100)) == {"gpu": 6, DEFAULT_POOL: 0}


def test_only_what_no_pool_in_question_has_passed_is_looked_at() -> None:
    marks = {
        Consumption("env_worker", TASKS_IN, "gpu"): {0: (5, frozenset()), 1: (9, frozenset())},
        Consumption("env_worker", TASKS_IN): {0: (3, frozenset())},
    }
    both = Tally(["gpu", DEFAULT_POOL], Done(marks), owning(INSTALLATION))
    assert both.first(TASKS_IN) == {0: 3}
    assert Tally(["gpu"], Done(marks), owning(INSTALLATION)).first(TASKS_IN) == {0: 5, 1: 9}


def test_a_record_is_done_when_its_own_pool_was_done_with_it() -> None:
    for settings, under_way in ((INSTALLATION, 1), (Settings(), 0)):
        ledger = Ledger("run-1", done(DEFAULT_POOL, 100), owner=owning(settings))
        for record in Log().records(SWE):
            ledger.take(record)
        assert ledger.under_way == under_way


def test_every_record_that_is_work_has_one_worker() -> None:
    assert worker_for(ROLLOUTS_RETRIES, {"stage": "verification"}) == "verifier_worker"
    assert worker_for(ROLLOUTS_RETRIES, {"stage": "agent"}) == "env_worker"
    assert {worker_for(topic, {}) for topic in CATALOGUE} == {"env_worker", "agent_worker", "verifier_worker", None}


# What is said.

BOTH = Pools.of(INSTALLATION)
NOBODY = [*CONSUMPTIONS, *consumptions_of("gpu")]


def of_run(*events: object, manifest: bool = True) -> PoolsOfRun:
    known = run_published(groups=1, attempts=2, environment="swe") if manifest else None
    found = PoolsOfRun(BOTH, known)
    for event in events:
        found.take(header_map(event.headers()))  # type: ignore[attr-defined]
    return found


def test_a_run_waits_for_the_pools_of_its_attempts_that_have_not_ended() -> None:
    first, second = Attempt(SWE), Attempt(SWE, index=1)
    assert of_run().waiting() == {"gpu": 2}
    assert of_run(manifest=False).waiting() == {}
    for manifest in (True, False):
        assert of_run(SWE, first.ready(), manifest=manifest).waiting() == {"gpu": 2}
        assert of_run(first.scored(), SWE, first.ready(), manifest=manifest).waiting() == {"gpu": 1}
        assert of_run(SWE, first.scored(), first.scored(), second.failed(), manifest=manifest).waiting() == {}
        again = of_run(SWE, first.failed(), second.scored(), first.retry(next_round=1), manifest=manifest)
        assert again.waiting() == {"gpu": 1}


def test_whoever_watches_is_told_of_the_pool_that_the_run_waits_for_and_of_no_other() -> None:
    assert notices(after(), NOBODY, of_run()) == [
        "pool gpu: nobody serves it, 2 attempts wait (environment swe): `rollstream up --pool gpu` where its plug-ins are"
    ]
    some = [one for one in consumptions_of("gpu") if one.worker == "agent_worker"]
    assert notices(after(), some, of_run()) == [
        "nobody consumes sessions.ready for pool gpu: start an agent_worker (`rollstream up --pool gpu`)"
    ]
    assert notices(after(), CONSUMPTIONS, of_run()) == []


def test_the_doctor_says_what_waits_for_a_pool_and_does_not_call_it_a_fault() -> None:
    def check(*members: str, backlog: Backlog | None) -> tuple[str, str, str, str]:
        states = [GroupState(one, members, 4) for one in consumptions_of("gpu")]
        (found,) = pool_checks(BOTH, states, backlog)
        return found.name, found.mark, found.found, found.remedy

    assert check(backlog=Backlog({"gpu": 12})) == (
        "pool gpu",
        "note",
        "nobody serves it, 12 records wait (environment swe)",
        "rollstream up --pool gpu, where its plug-ins are",
    )
    assert "at least 12 records wait" in check(backlog=Backlog({"gpu": 12}, is_all=False))[2]
    assert check("m", backlog=None)[1] == "ok"
    half = [GroupState(one, ("m",) if one.worker == "env_worker" else (), 0) for one in consumptions_of("gpu")]
    (found,) = pool_checks(BOTH, half, Backlog({"gpu": 3}))
    assert found.mark == "note"
    assert found.found.startswith("nobody consumes sessions.ready, episodes.completed, rollouts.retries, 3 records wait")


def test_a_pool_is_unserved_when_nobody_consumes_any_of_its_topics() -> None:
    assert unserved(BOTH, NOBODY) == [DEFAULT_POOL, "gpu"]
    assert unserved(BOTH, consumptions_of("gpu")[1:]) == []
    claims = pools(x={"environments": ["a", "b"], "harnesses": ["h"], "sandboxes": ["s", "t"]})
    assert claims.describe("x") == "environments a, b; harness h; sandboxes s, t"
    assert nobody_serves(claims, DEFAULT_POOL) == "pool default: nobody serves it (what no other pool claims)"


# What may be published.


def test_a_declared_name_is_accepted_unchecked_and_noted_and_an_undeclared_one_is_refused() -> None:
    admission = Admission(pools(gpu={"environments": ["swe"], "harnesses": ["coder", "chat"]}), Backends.of(Settings()))
    for harness in ("coder", "chat"):
        admission.check_names("swe", Composition(harness=harness))
        admission.check("swe", Composition(harness=harness), {"whatever": 1})
    assert admission.notes() == (
        "harness coder is not installed here: its tasks are published unchecked, and wait for pool gpu",
        "environment swe is not installed here: its tasks are published unchecked, and wait for pool gpu",
    )
    with pytest.raises(UsageError, match=r"found 'nowhere'"):
        admission.check_names("nowhere", Composition())
    with pytest.raises(UsageError, match=r"expected one of the harnesses .*chat, .*tools, found 'nobody'"):
        admission.check_names(None, Composition(harness="nobody"))


def test_a_name_that_a_pool_declares_only_together_with_another_says_so() -> None:
    admission = Admission(pools(gpu={"environments": ["swe"], "harnesses": ["coder"]}), Backends.of(Settings()))
    with pytest.raises(Refused, match="pool gpu serves environment swe; harness coder"):
        admission.check("swe", Composition(harness="chat"), {})
    with pytest.raises(UsageError, match=r"found 'coder'.*; pool gpu serves environment swe; harness coder"):
        admission.check_names("math", Composition(harness="coder"))


def test_what_is_installed_here_is_checked_whoever_serves_it() -> None:
    admission = Admission(pools(gpu={"environments": ["math"]}), Backends.of(Settings()))
    with pytest.raises(Refused, match="expected a task of environment math"):
        admission.check("math", Composition(), {"no": "task"})
    assert admission.notes() == ()


def test_what_a_worker_reads_without_a_group_is_nobodys_backlog() -> None:
    """Endings are read by env_workers that hold something open, and committed by nobody."""
    assert sorted({one.group(KafkaSettings()) for one in CONSUMPTIONS if one.worker == "env_worker"}) == [
        "env_worker",
        "env_worker.actions",
        "env_worker.retries",
    ]
