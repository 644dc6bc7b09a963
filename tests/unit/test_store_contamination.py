"""Grading data in a prompt is flagged, whoever came first; trivial answers are not, and the text stays private."""

from itertools import permutations
from pathlib import Path

import duckdb
import pytest

from rollstream.store.contamination import GradingText, Prompt, counts, findings, grading_texts
from rollstream.store.database import StoreFiles
from schemas.task import TaskSubmitted
from tests.events import Attempt, Log, task_submitted
from tests.stores import answer, writing

SECRET = "The answer is\n  forty-two, because seven times six is."
FLAGS = "SELECT task_id, rollout_id, field, in_task FROM contamination ORDER BY ALL"


def task_with(**row: object) -> TaskSubmitted:
    return task_submitted().model_copy(update={"row": {"question": "What is it?", **row}})


def leaking(task: TaskSubmitted) -> Attempt:
    return Attempt(task, question=f"Hint: {SECRET.upper()} Now solve it.")


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "in two"])
def test_grading_text_in_a_prompt_is_flagged_whoever_came_first(tmp_path: Path, order: tuple[int, ...], together: bool) -> None:
    task = task_with(expected_answer="42", solution={"steps": ["no", SECRET]})
    attempt = leaking(task)
    log = Log()
    records = [log.records(task, attempt.ready())[place] for place in order]
    with writing(tmp_path) as store:
        for batch in [records] if together else [[record] for record in records]:
            store.apply(batch)
        store.publish()
    assert answer(tmp_path, FLAGS) == [("task-1", attempt.rollout, "solution", False)]


def test_the_text_itself_is_in_the_private_file_alone(tmp_path: Path) -> None:
    canary = "canary four words long CANARY-7812"
    task = task_with(solution=canary)
    with writing(tmp_path) as store:
        store.apply(Log().records(task, Attempt(task).ready()))
        store.publish()
    assert b"CANARY-7812" not in StoreFiles(tmp_path).published.read_bytes()
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT field, text FROM grading_texts").fetchall() == [("solution", canary.casefold())]


def test_what_a_later_prompt_shows_is_flagged_and_what_the_agent_says_is_not(tmp_path: Path) -> None:
    task = task_with(solution=SECRET).model_copy(update={"attempts": 2})
    heard, said = Attempt(task), Attempt(task, index=1, answer=SECRET)
    step = heard.stepped().model_copy(update={"new_messages": [{"role": "tool", "content": f"$ cat solution\n{SECRET}"}]})
    talk = said.stepped().model_copy(update={"new_messages": [{"role": "assistant", "content": SECRET}]})
    with writing(tmp_path) as store:
        store.apply(Log().records(task, heard.ready(), step, said.ready(), talk, *said.events()[2:]))
        store.publish()
    assert answer(tmp_path, FLAGS) == [("task-1", heard.rollout, "solution", False)]


def test_what_the_task_itself_shows_says_so(tmp_path: Path) -> None:
    task = task_with(solution=SECRET).model_copy(update={"row": {"question": f"Is it true? {SECRET}", "solution": SECRET}})
    with writing(tmp_path) as store:
        store.apply(Log().records(task, leaking(task).ready()))
        store.publish()
    assert answer(tmp_path, "SELECT field, in_task FROM contamination") == [("solution", True)]


@pytest.mark.parametrize("trivial", ["4", "B", "Paris", "x = 3", "forty two", "a b c d", 42, None, True, "", "CANARY-4711"])
def test_a_trivial_answer_flags_nothing(tmp_path: Path, trivial: object) -> None:
    task = task_with(expected_answer=trivial)
    with writing(tmp_path) as store:
        store.apply(Log().records(task, Attempt(task, question=f"Is it {trivial}? 4 B Paris").ready()))
        store.publish()
    assert answer(tmp_path, FLAGS) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four", False),
        ("eleven twelve thirteen fourteen", True),
        ("two words-and-more-characters", False),
        ("f" * 40, True),
        ("f" * 39, False),
        ("a" + " " * 100 + "b", False),
    ],
)
def test_a_text_counts_by_words_or_by_length(text: str, expected: bool) -> None:
    assert counts(text) is expected


def test_an_environment_that_is_not_installed_flags_nothing() -> None:
    task = {"environment": "elsewhere", "row": {"solution": SECRET}}
    assert grading_texts(task) == []
    assert len(grading_texts(task, lambda name: frozenset())) == 1


def test_a_task_of_many_texts_is_bounded() -> None:
    task = {"environment": "any", "row": {"tests": [f"number {n} of very many test cases" for n in range(1_000)]}}
    assert len(grading_texts(task, lambda name: frozenset())) == 64


def test_findings_are_one_a_session_and_field() -> None:
    texts = {"g": [GradingText("solution", "seven times six is forty-two", False)]}
    prompt = Prompt("run", "g", "rollout", "session", "Seven  times six\nis forty-two!")
    assert len(findings([prompt, prompt], texts)) == 1
    assert findings([Prompt("run", "other", "rollout", "session", prompt.text)], texts) == []


def test_a_pruned_session_takes_its_flag_with_it(tmp_path: Path) -> None:
    task = task_with(solution=SECRET)
    with writing(tmp_path) as store:
        store.apply(Log().records(task, leaking(task).ready()))
        store.prune(None, "run-1")
        store.publish()
    assert answer(tmp_path, "SELECT count(*) FROM contaminated") == [(0,)]
