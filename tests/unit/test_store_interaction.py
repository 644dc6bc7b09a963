"""What SQL says of episodes in which the environment answers back."""

from pathlib import Path

from schemas.action import ToolCall
from schemas.envelope import Event
from schemas.step import AgentStepped, Execution
from tests.events import CANARY, Attempt
from tests.stores import answer, publish_events

ATTEMPT = Attempt()


def second_step() -> AgentStepped:
    first = ATTEMPT.stepped()
    name = first.event_id.replace(first.event_id[:8], "00000002")
    message = {"role": "assistant", "content": "It is 2."}
    return first.model_copy(update={"event_id": name, "index": 1, "previous": first.event_id, "message": message})


def episode() -> list[Event]:
    """Two actions asked for by one answer, then the end."""
    actions = [ATTEMPT.acted(0), ATTEMPT.acted(1, ToolCall(id="call-1", name="look"))]
    last = second_step()
    completed = ATTEMPT.completed().model_copy(
        update={"actions": [one.event_id for one in actions], "steps": [ATTEMPT.stepped().event_id, last.event_id]}
    )
    seen = [ATTEMPT.observed(0), ATTEMPT.observed(1, "nothing")]
    return [
        ATTEMPT.ready(),
        ATTEMPT.stepped(),
        *actions,
        *seen,
        ATTEMPT.step_rewarded(0, 0.5),
        last,
        completed,
        ATTEMPT.scored(),
    ]


def zombie() -> list[Event]:
    """What an execution left that was taken over."""
    execution = Execution(id="zombie", fence=1)
    stepped = ATTEMPT.stepped()
    other = stepped.event_id.replace(stepped.event_id[:8], "0000dead")
    return [stepped.model_copy(update={"event_id": other, "execution": execution, "index": 1, "previous": stepped.event_id})]


def test_a_trajectory_tells_calls_actions_observations_and_rewards_in_their_order(tmp_path: Path) -> None:
    # As the log may deliver them: topics are read side by side.
    store = publish_events(tmp_path, *reversed(episode()))
    rows = answer(store, "SELECT what, step_index, action_index, reward, counts FROM trajectory_events ORDER BY position")
    assert rows == [
        ("call", 0, None, None, True),
        ("action", 0, 0, None, True),
        ("observation", 0, 0, None, True),
        ("reward", 0, 0, 0.5, True),
        ("action", 0, 1, None, True),
        ("observation", 0, 1, None, True),
        ("call", 1, None, None, True),
    ]
    contents = answer(store, "SELECT content ->> '$.name' FROM trajectory_events WHERE what = 'action' ORDER BY position")
    assert contents == [("add",), ("look",)]


def test_what_a_zombie_left_is_told_and_does_not_count(tmp_path: Path) -> None:
    store = publish_events(tmp_path, *episode(), *zombie())
    counted = answer(store, "SELECT counts, count(*) FROM trajectory_events WHERE what = 'call' GROUP BY ALL ORDER BY ALL")
    assert counted == [(False, 1), (True, 2)]


def test_step_rewards_are_told_by_session_and_step(tmp_path: Path) -> None:
    store = publish_events(tmp_path, *episode())
    rows = answer(store, "SELECT session_id, step, reward, components ->> '$.sum', counts FROM step_rewards")
    assert rows == [(ATTEMPT.session, 0, 0.5, "0.25", True)]


def test_an_answer_that_was_given_twice_is_stored_once_and_the_first_one_counts(tmp_path: Path) -> None:
    first, second = ATTEMPT.observed(0, "first"), ATTEMPT.observed(0, "second")
    store = publish_events(
        tmp_path, ATTEMPT.acted(), first, second, ATTEMPT.step_rewarded(0, 0.5), ATTEMPT.step_rewarded(0, 0.75)
    )
    seen = answer(store, "SELECT content ->> '$[0].content' FROM trajectory_events WHERE what = 'observation'")
    assert seen == [("first",)]
    assert answer(store, "SELECT reward FROM step_rewards") == [(0.5,)]


def test_what_environments_asked_of_models_is_in_the_usage_and_not_in_the_words_that_are_published(tmp_path: Path) -> None:
    called = [ATTEMPT.environment_called(0), ATTEMPT.environment_called(1), ATTEMPT.environment_called(2, "judge")]
    store = publish_events(tmp_path, *episode(), *called, called[0])
    rows = answer(store, "SELECT role, calls, completion_tokens > 0, model_s FROM usage")
    assert rows == [("judge", 1, True, 1.5), ("policy", 2, True, 3.0), ("user", 2, True, 3.0)]
    for table in ("environment_called", "events"):
        assert answer(store, f"SELECT count(*) FROM {table} WHERE payload LIKE '%{CANARY}%'") == [(0,)]
    assert answer(store, "SELECT count(*) FROM contamination") == [(0,)]
    told = answer(store, "SELECT DISTINCT what FROM trajectory_events ORDER BY what")
    assert told == [("action",), ("call",), ("observation",), ("reward",)]


def test_neither_ticket_nor_receipt_is_published(tmp_path: Path) -> None:
    store = publish_events(tmp_path, *episode())
    for table in ("action_requested", "observation_returned", "episode_completed"):
        assert answer(store, f"SELECT count(*) FROM {table} WHERE payload LIKE '%sealed%'") == [(0,)]
