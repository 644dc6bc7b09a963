"""The environment `math`: which rows it takes, how it finds an answer, and how it scores."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.answers import last_boxed
from rollstream.environments.graders import GraderPool
from rollstream.environments.math import Found, MathEnvironment, MathTask, compare, final_answer
from rollstream.environments.protocol import Episode, GraderCrashed, GraderTimeout, Services, Verdict
from rollstream.environments.registry import admit
from rollstream.errors import EnvironmentFailure, Refused
from schemas.session import Submission

R = TypeVar("R")
MATH = MathEnvironment()


class Grader:
    """Answers every request alike, and remembers what it was asked."""

    def __init__(self, outcome: bool | EnvironmentFailure) -> None:
        self.outcome = outcome
        self.asked: list[tuple[str, str]] = []

    async def run(self, function: Callable[..., R], *args: Any) -> Any:
        self.asked.append(args[:2])
        if isinstance(self.outcome, EnvironmentFailure):
            raise self.outcome
        return self.outcome


async def scored(reference: object, text: str, grader: Grader | None = None) -> Verdict:
    task = MathTask.model_validate({"question": "?", "answer": reference})
    episode = Episode([], Submission(text=text), "completed")
    return await MATH.verify(task, episode, Services(grader or Grader(False)))


@pytest.mark.parametrize(
    ("text", "answer", "method"),
    [
        (r"so \boxed{\frac{1}{2}} then", r"\frac{1}{2}", "boxed"),
        (r"\boxed{1} no, \boxed{2}", "2", "boxed"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"),
        (r"\boxed {7}", "7", "boxed"),
        (r"The answer is 5. \boxed{}", "5", "statement"),
        ("The answer is 18.", "18", "statement"),
        ("The answer is 18. I hope it is correct.", "18", "statement"),
        ("the final answer is: $\\frac{3}{4}$", "$\\frac{3}{4}$", "statement"),
        ("The answer is \\(x^2\\).", "x^2", "statement"),
        ("**Answer:** $18.50", "$18.50", "statement"),
        ("Answer: **12**", "12", "statement"),
        ("answer\nis 7", "7", "statement"),
        ("The answer is that she makes 18 dollars", "18", "statement"),
        ("The answer is Tuesday.", "Tuesday", "statement"),
        ("The answer is 3. No: the answer is 4", "4", "statement"),
        ("work 3 + 4\n#### 7\n", "7", "hashes"),
        ("The answer is not clear.\n#### 1,234", "1,234", "hashes"),
        ("She makes 9 * 2 = $18 every day.", "$18", "last_number"),
        ("It is 3.14", "3.14", "last_number"),
        ("total: 5-3", "3", "last_number"),
        ("1,234,567 people", "1,234,567", "last_number"),
        ("about -2/3 of it", "-2/3", "last_number"),
        ("we get $x=5$", "x=5", "last_formula"),
        (r"\boxed{5", "5", "last_number"),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str, method: str) -> None:
    assert final_answer(text) == Found(answer, method)


@pytest.mark.parametrize("text", ["", " \n", "no idea", r"\boxed{}", "H2O", "\x00", "\ud800", "####", "answer is", "$$"])
def test_where_there_is_no_answer_none_is_found(text: str) -> None:
    assert final_answer(text) is None


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Z", "Cs", "Cc"])))
def test_any_text_is_searched_without_failing(text: str) -> None:
    found = final_answer(text)
    assert found is None or found.answer.strip() == found.answer != ""


@given(st.text(alphabet="a1{}\\ $"))
def test_what_is_boxed_is_found_if_its_braces_balance(inner: str) -> None:
    boxed = last_boxed(rf"\boxed{{{inner}}}")
    assert boxed is None or boxed in inner.strip() or inner.strip() in boxed


@pytest.mark.parametrize(
    "unit", ["answer ", "answer is ", "answer" + " " * 50, "\\boxed{", "$", "\\(", "1,", "1", "-", "a b ", "####", "1/", "="]
)
def test_searching_takes_linear_time(unit: str) -> None:
    text = unit * (5_000_000 // len(unit))
    started = time.perf_counter()
    final_answer(text)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("field", "reference"),
    [
        ({"answer": "9 * 2 = 18\n#### 18"}, "18"),
        ({"answer": 18}, "18"),
        ({"answer": 0.5}, "0.5"),
        ({"expected_answer": r"\(\frac{333}{1997}\)"}, r"\(\frac{333}{1997}\)"),
        ({"answer": "long working", "expected_answer": "5"}, "5"),
        ({"solution": r"Thus \boxed{x^2}."}, "x^2"),
        ({"answer": "3", "solution": r"\boxed{4}"}, "3"),
        ({"answer": "no real solutions"}, "no real solutions"),
        ({"answer": r"\text{Tuesday}"}, r"\text{Tuesday}"),
        ({"answer": "\u221e"}, None),
    ],
)
def test_the_reference_is_read_from_the_row(field: dict[str, object], reference: str | None) -> None:
    if reference is None:
        with pytest.raises(Refused):
            admit(MATH, {"question": "?", **field})
        return
    task = admit(MATH, {"question": "?", **field})
    assert isinstance(task, MathTask)
    assert task.reference == reference


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": "?"}, "found none"),
        ({"question": "?", "answer": ""}, "found none"),
        ({"question": "?", "answer": "####"}, "found none"),
        ({"question": "?", "answer": "nan"}, "found none"),
        ({"question": "?", "answer": None}, "found none"),
        ({"question": "?", "answer": True}, "valid string"),
        ({"question": "?", "answer": ["1"]}, "valid string"),
        ({"question": "?", "answer": "She sold 48 clips in April and 24 in May, so 72 in all."}, "found prose"),
        ({"question": "?", "answer": "1" * 3000}, "found prose"),
        ({"question": "?", "answer": r"\frac{1}{2"}, "balanced braces"),
        ({"question": "?", "answer": "?!"}, "found something else"),
        ({"question": "?", "solution": "It is 4."}, "found none"),
        ({"answer": "4"}, "expected a question or messages, found neither"),
        ({"question": " ", "answer": "4"}, "found neither"),
        ({"messages": [], "answer": "4"}, "found neither"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}], "answer": "4"}, "assistant's"),
    ],
)
def test_a_row_without_question_or_gradable_answer_is_refused(row: dict[str, object], found: str) -> None:
    with pytest.raises(Refused, match=found):
        admit(MATH, row)


def test_messages_of_the_row_are_shown_as_they_are() -> None:
    messages = [{"role": "user", "content": "2 + 2?"}]
    seeded = MATH.seed(MathTask.model_validate({"messages": messages, "question": "other", "answer": "4"}))
    assert seeded.messages == messages


def test_a_question_is_shown_with_how_to_answer() -> None:
    (message,) = MATH.seed(MathTask.model_validate({"question": "2 + 2?", "answer": "4"})).messages
    assert str(message["content"]).startswith("2 + 2?\n")
    assert r"\boxed{}" in str(message["content"])


async def test_plain_numbers_are_compared_without_a_grader() -> None:
    grader = Grader(True)
    assert (await scored("#### 1,000", "The answer is $1000.00.", grader)).reward == 1.0
    assert (await scored("#### 1,000", "The answer is 999", grader)).reward == 0.0
    assert grader.asked == []


async def test_formulas_are_left_to_the_grader() -> None:
    grader = Grader(True)
    verdict = await scored(r"\(\sqrt{2}\)", r"\boxed{2^{1/2}}", grader)
    assert grader.asked == [(r"\sqrt{2}", "2^{1/2}")]
    assert verdict.reward == 1.0
    assert verdict.diagnostics == {"answer": "2^{1/2}", "method": "boxed", "compared": "symbolically"}


@pytest.mark.parametrize("text", ["", "I do not know.", "\x00", "x" * 5_000_000])
async def test_an_answer_that_is_none_scores_zero(text: str) -> None:
    verdict = await scored("4", text)
    assert verdict.reward == 0.0
    assert verdict.diagnostics == {"answer": None, "method": "none"}


async def test_an_answer_that_hangs_the_grader_scores_zero() -> None:
    verdict = await scored("4", r"\boxed{9^{9^{9^9}}}", Grader(GraderTimeout("too long")))
    assert verdict.reward == 0.0
    assert verdict.diagnostics["grader"] == "timeout"


async def test_a_grader_that_crashes_is_no_score() -> None:
    with pytest.raises(EnvironmentFailure) as failure:
        await scored("4", r"\boxed{x}", Grader(GraderCrashed("killed")))
    assert (failure.value.stage, failure.value.retryable) == ("verification", True)


async def test_a_document_in_a_box_is_not_compared() -> None:
    grader = Grader(True)
    verdict = await scored("x", rf"\boxed{{{'x+' * 2000}x}}", grader)
    assert (verdict.reward, grader.asked) == (0.0, [])


async def test_diagnostics_tell_what_was_read_and_not_what_was_expected() -> None:
    verdict = await scored("87654321", r"\boxed{5}")
    assert "87654321" not in str(verdict)


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
        (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt 3}", True),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}", False),
        ("(x-1)(x+1)", "x^2-1", True),
        ("(x-1)(x+1)", "x^2+1", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("(1, 2)", "(2, 1)", False),
        (r"\text{Tuesday}", "Tuesday", True),
        (r"\text{Tuesday}", "Monday", False),
        (r"2\pi", r"\pi \cdot 2", True),
        (r"2\pi", "6.28", False),
        ("5", "5 million", False),
        ("4", "2+2", True),
        ("0", "(2-\\sqrt{3})^{2016}", False),
        (r"90^\circ", "90", True),
        ("x", "}{", False),
        ("x", r"\undefined{x}{", False),
    ],
)
async def test_formulas_are_equal_by_algebra(reference: str, answer: str, equal: bool) -> None:
    async with GraderPool(1, 20.0) as graders:
        task = MathTask.model_validate({"question": "?", "answer": reference})
        episode = Episode([], Submission(text=rf"\boxed{{{answer}}}"), "completed")
        assert (await MATH.verify(task, episode, Services(graders))).reward == float(equal)


def test_spaces_between_numbers_mean_something() -> None:
    assert compare("1 1/2", "11/2") is False
    assert compare("12", "1 2") is None
