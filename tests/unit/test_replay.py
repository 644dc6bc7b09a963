"""Going on with a session that somebody else began: which recorded steps hold, and what is asked again."""

import itertools
from collections.abc import Iterable
from typing import Any

from hypothesis import given, strategies as st

from schemas.identities import event_id
from schemas.step import AgentStepped, Execution
from services.agent_worker.replay import completion_of, consistent_prefix, read_steps
from tests.events import Attempt

SESSION = Attempt().session


def step(execution: str, fence: int, index: int, previous: AgentStepped | None, text: str = "") -> AgentStepped:
    return Attempt().stepped().model_copy(
        update={
            "event_id": event_id("AgentStepped", SESSION, execution, "agent", index),
            "execution": Execution(id=execution, fence=fence),
            "index": index,
            "previous": None if previous is None else previous.event_id,
            "message": {"role": "assistant", "content": text or f"{execution}{index}"},
        }
    )  # fmt: skip


def chain(execution: str, fence: int, count: int, after: list[AgentStepped] | None = None) -> list[AgentStepped]:
    """So many steps of one execution, that go on from another's."""
    before, made = list(after or []), []
    for _ in range(count):
        made.append(step(execution, fence, len(before), before[-1] if before else None))
        before.append(made[-1])
    return made


def said(steps: Iterable[AgentStepped]) -> list[Any]:
    return [one.message["content"] for one in steps]


def test_nothing_recorded_is_nothing_to_go_on_from() -> None:
    assert consistent_prefix([]) == []


def test_the_steps_of_a_dead_execution_are_gone_on_from() -> None:
    assert said(consistent_prefix(chain("a", 1, 3))) == ["a0", "a1", "a2"]


def test_a_trajectory_leads_through_every_execution_that_took_over() -> None:
    first = chain("a", 1, 2)
    second = chain("b", 2, 2, after=first)
    third = chain("c", 3, 1, after=[*first, *second])
    assert said(consistent_prefix([*first, *second, *third])) == ["a0", "a1", "b2", "b3", "c4"]


def test_the_steps_of_a_zombie_never_mix_in() -> None:
    first = chain("a", 1, 4)
    second = chain("b", 2, 1, after=first[:2])
    assert said(consistent_prefix([*first, *second])) == ["a0", "a1", "b2"]
    assert said(consistent_prefix([*first[:2], *second, *first[2:]])) == ["a0", "a1", "b2"]


def test_a_chain_with_a_hole_is_not_gone_on_from() -> None:
    first = chain("a", 1, 3)
    second = chain("b", 2, 2, after=first)
    assert said(consistent_prefix([first[0], first[2], *second])) == ["a0"]


def test_of_two_contents_under_one_id_the_first_counts() -> None:
    (first,) = chain("a", 1, 1)
    again = step("a", 1, 0, None, text="another answer")
    assert said(consistent_prefix([first, again])) == ["a0"]


def test_what_cannot_be_read_is_left_out() -> None:
    steps = chain("a", 1, 2)
    raw = [b"\xff", steps[0].to_json(), b"{}", steps[1].to_json()]
    assert said(consistent_prefix(read_steps(raw))) == ["a0", "a1"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6), st.randoms())
def test_what_is_gone_on_from_is_always_one_whole_chain_of_the_highest_fence_that_has_one(
    takeovers: list[tuple[int, int]], rng: Any
) -> None:
    """Executions that each go on from a prefix of the one before, delivered in any order."""
    everything: list[AgentStepped] = []
    line: list[AgentStepped] = []
    for fence, (kept, made) in enumerate(takeovers):
        fresh = chain(f"e{fence}-", fence, made, after=line[:kept])
        line = [*line[:kept], *fresh]
        everything += fresh
    rng.shuffle(everything)
    found = consistent_prefix(everything)
    assert [one.index for one in found] == list(range(len(found)))
    assert all(after.previous == before.event_id for before, after in itertools.pairwise(found))
    assert (not found) == (not everything)
    if found:
        assert found[-1].execution.fence == max(one.execution.fence for one in everything)


def test_a_recorded_answer_is_given_as_it_was() -> None:
    recorded = Attempt().stepped()
    completion = completion_of(recorded)
    assert (completion.message, completion.usage, completion.model) == (recorded.message, recorded.call.usage, "small-1b")
    assert completion.response == recorded.response
