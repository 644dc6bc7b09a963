"""Scoring an episode: what is believed of it, and what is recorded of a verification that fails."""

import asyncio
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest

from rollstream.environments import registry
from rollstream.environments.protocol import Episode, Services, Verdict, role_models
from rollstream.errors import EnvironmentFailure, EpisodeTimeout, Refused
from rollstream.settings import Limits
from rollstream.testing.model_server import ScriptedModelServer, always
from rollstream.testing.playing import NoGraders
from schemas.action import ActionRequested
from schemas.episode import EpisodeCompleted
from schemas.rollout import RolloutScored
from schemas.values import Composition, EpisodeLimits
from schemas.verdict import VerdictReached
from services.verifier_worker.handler import VerifyHandler
from tests.unit.test_step_handler import Bench, Lab, LabEnvironment, LabTask, Session


class JudgedEnvironment(LabEnvironment):
    """A lab in which a judge is asked twice, and then something goes wrong."""

    name: ClassVar[str] = "judged"
    wrong: ClassVar[str] = ""

    async def score(self, task: LabTask, world: Lab, episode: Episode, services: Services) -> Verdict:
        for _ in range(2):
            await role_models(services, "judge").complete([{"role": "user", "content": "How was it?"}], "judge")
        if self.wrong == "raises":
            raise ZeroDivisionError("in the verdict")
        return Verdict(reward=float("nan") if self.wrong == "nan" else 1.0)


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "lab", LabEnvironment)


def verifier(bench: Bench, **limits: float) -> VerifyHandler:
    return VerifyHandler(
        Limits.model_validate(limits), bench.tickets, NoGraders(), bench.models, bench.published, "verifier_worker@test:1"
    )


async def acted(bench: Bench, count: int, session: Session | None = None) -> tuple[Session, list[ActionRequested], list[str]]:
    """Some actions, and the receipt after each."""
    session = session or await bench.session()
    requests: list[ActionRequested] = []
    receipts: list[str] = []
    for index in range(count):
        requests.append(session.asks(index, receipts[-1] if receipts else None, "add", number=1))
        observed = await bench.act(requests[-1])
        assert observed.receipt is not None
        receipts.append(observed.receipt)
    bench.published.events.clear()
    return session, requests, receipts


def episode(session: Session, **changes: Any) -> EpisodeCompleted:
    composition = Composition(harness="tools", models={"policy": "p", "judge": "judge-1b"})
    told = {"ticket": session.ticket, "environment": session.environment, "composition": composition, "actions": []}
    return session.attempt.completed().model_copy(update=told | changes)


async def test_an_episode_is_scored_by_the_world_and_the_rewards_in_its_last_receipt() -> None:
    bench = Bench()
    session, requests, receipts = await acted(bench, 2)
    await verifier(bench).verify(episode(session, actions=[one.event_id for one in requests], receipt=receipts[-1]))
    reached, scored = bench.published.events
    assert isinstance(reached, VerdictReached)
    assert isinstance(scored, RolloutScored)
    assert (reached.reward, [step.reward for step in reached.steps]) == (1.25, [0.25, 0.25])


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("an older receipt", "2 actions with the receipt of 1"),
        ("an older receipt and not the last action", None),
        ("a receipt of another session", "does not belong to session"),
        ("no receipt", "2 actions without any receipt"),
        ("an action left out", "1 action with the receipt of 2"),
        ("an action that was not done", "2 actions with the receipt of others"),
        ("the actions in another order", "2 actions with the receipt of others"),
    ],
)
async def test_an_episode_whose_actions_are_not_those_of_its_receipt_gets_no_verdict(told: str, found: str | None) -> None:
    bench = Bench()
    session, requests, receipts = await acted(bench, 2)
    _, _, others = await acted(bench, 2, await bench.session(1))
    first, second = (one.event_id for one in requests)
    told_as: dict[str, dict[str, Any]] = {
        "an older receipt": {"actions": [first, second], "receipt": receipts[0]},
        # The limit of what can be known: this is an episode that was broken off, as far as any record here tells.
        "an older receipt and not the last action": {"actions": [first], "receipt": receipts[0]},
        "a receipt of another session": {"actions": [first, second], "receipt": others[1]},
        "no receipt": {"actions": [first, second], "receipt": None},
        "an action left out": {"actions": [first], "receipt": receipts[1]},
        "an action that was not done": {"actions": [first, "made-up"], "receipt": receipts[1]},
        "the actions in another order": {"actions": [second, first], "receipt": receipts[1]},
    }
    handed_in = episode(session, **told_as[told])
    if found is None:
        await verifier(bench).verify(handed_in)
        return
    with pytest.raises(Refused, match=found):
        await verifier(bench).verify(handed_in)
    assert bench.published.events == []


@pytest.mark.parametrize(("wrong", "fails"), [("raises", ZeroDivisionError), ("nan", EnvironmentFailure), ("", None)])
async def test_what_a_judge_was_asked_is_in_the_log_whatever_comes_of_the_verdict(
    wrong: str, fails: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "judged", JudgedEnvironment)
    monkeypatch.setattr(JudgedEnvironment, "wrong", wrong)
    async with ScriptedModelServer(always("Fine.")) as server:
        bench = Bench(base_url=server.base_url)
        session = await bench.session()
        session.environment = "judged"
        handed_in = episode(session)
        for _ in range(2):
            with nullcontext() if fails is None else pytest.raises(fails):
                await verifier(bench).verify(handed_in)
        await bench.models.close()
    # A verification that is repeated has asked once more.
    assert [(one.stage, one.cause, one.index) for one in bench.called] == [
        ("verification", handed_in.event_id, index) for _ in range(2) for index in range(2)
    ]
    assert len({one.event_id for one in bench.called}) == 4
    verdicts = [event for event in bench.published.events if isinstance(event, VerdictReached)]
    assert len(verdicts) == (0 if wrong else 2)


class Slow(LabEnvironment):
    async def verify(self, task: LabTask, episode: Episode, services: Services) -> Verdict:
        await asyncio.sleep(0.4)
        return Verdict(reward=1.0)


@pytest.mark.parametrize(
    ("limit_s", "episode_s", "revision", "told"),
    [
        (0.1, 60.0, 0, "gave no verdict within 0.1 s"),
        (60.0, 2.1, 0, "episode and verdict took longer than 2.1 s"),
        (60.0, 1.0, 0, "episode and verdict took longer than 1 s"),
        (60.0, 1.0, 1, None),
        (60.0, 60.0, 0, None),
    ],
)
async def test_a_verdict_beyond_its_own_or_the_episodes_time_is_tried_again_and_no_zero(
    limit_s: float, episode_s: float, revision: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "lab", Slow)
    bench = Bench()
    # The agent took two seconds.
    handed_in = episode(await bench.session(), limits=EpisodeLimits(episode_timeout_s=episode_s))
    verifying = verifier(bench, verification_timeout_seconds=limit_s).verify(handed_in, revision)
    if told is None:
        await verifying
        return
    with pytest.raises(EpisodeTimeout, match=told) as caught:
        await verifying
    assert (caught.value.kind, caught.value.stage, caught.value.retryable) == ("timeout", "verification", True)
    assert bench.published.events == []
