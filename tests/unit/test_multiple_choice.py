"""The environment `multiple_choice`: which rows it takes, and how a choice is read."""

import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.multiple_choice import (
    Choice,
    GradingMode,
    MultipleChoiceEnvironment,
    MultipleChoiceTask,
    chosen,
)
from rollstream.environments.registry import admit
from rollstream.errors import Refused

OPTIONS = {"A": "London", "B": "Paris", "C": "Rome", "D": "A kind of cheese"}
MODES: list[GradingMode] = ["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient"]
ENVIRONMENT = MultipleChoiceEnvironment()


def task(**fields: Any) -> MultipleChoiceTask:
    admitted = admit(ENVIRONMENT, {"question": "Where?", "options": OPTIONS, "expected_answer": "B", **fields})
    assert isinstance(admitted, MultipleChoiceTask)
    return admitted


@pytest.mark.parametrize(
    ("text", "strict", "boxed", "colon", "lenient"),
    [
        (r"\boxed{B}", "B", "B", None, "B"),
        (r"\boxed{ (B) }", "B", "B", None, "B"),
        (r"\boxed{[B]}", "B", "B", None, "B"),
        (r"\boxed{\text{B}}", "B", "B", None, "B"),
        (r"$\boxed{\mathrm{B}}$", "B", "B", None, "B"),
        (r"\boxed{\text{B: Paris}}", "B", "B", None, "B"),
        (r"\boxed{B: a city}", "B", "B", None, "B"),
        (r"\boxed{B) Paris}", "B", "B", None, "B"),
        (r"\boxed{D: A kind of cheese}", "D", "D", None, "D"),
        (r"\boxed{b}", None, None, None, "B"),
        (r"\boxed{Paris}", None, "B", None, "B"),
        (r"\boxed{\text{ paris }}", None, "B", None, "B"),
        (r"\boxed{A kind of cheese}", None, "D", None, "D"),
        (r"\boxed{A city in France}", None, None, None, None),
        (r"\boxed{A} no, \boxed{B}", "B", "B", None, "B"),
        (r"\boxed{A or B}", None, None, None, None),
        (r"\boxed{A, B}", None, None, None, None),
        (r"\boxed{A: London or B: Paris}", None, None, None, None),
        (r"\boxed{A) or B)}", None, None, None, None),
        (r"\boxed{E}", None, None, None, None),
        (r"\boxed{B", None, None, None, None),
        (r"\boxed{42} Answer: B", None, None, "B", None),
        ("Answer: B", None, None, "B", "B"),
        ("Answer:B", None, None, "B", "B"),
        ("ANSWER : b", None, None, "B", "B"),
        ("Answer: **B**", None, None, "B", "B"),
        ("**Answer:** B", None, None, "B", "B"),
        ("Answer:\nB", None, None, "B", "B"),
        ("Answer: (B)", None, None, "B", "B"),
        ("Answer: B: Paris", None, None, "B", "B"),
        ("Answer: Paris.", None, None, "B", "B"),
        ("Answer: B, since it is", None, None, "B", "B"),
        ("Answer: A\nAnswer: B", None, None, "B", "B"),
        ("Answer: A or B", None, None, None, None),
        ("Answer: b or c", None, None, None, None),
        ("Answer: A and B", None, None, None, None),
        ("Answer: B/C", None, None, None, None),
        ("Answer: B C", None, None, None, None),
        ("Answer: a city", None, None, None, None),
        ("Answer: Berlin", None, None, None, None),
        ("Answer: not B", None, None, None, None),
        ("The answer is B.", None, None, None, "B"),
        ("The answer is (B) because of it.", None, None, None, "B"),
        ("The correct option is B", None, None, None, "B"),
        ("The answer is option B, not C", None, None, None, "B"),
        ("The answer is not A; the answer is B", None, None, None, "B"),
        ("The answer is D) A kind of cheese", None, None, None, "D"),
        ("The answer is a kind of cheese.", None, None, None, "D"),
        ("The answer is B. Option C is wrong.", None, None, None, "B"),
        ("B", None, None, None, "B"),
        ("(B)", None, None, None, "B"),
        ("B.", None, None, None, "B"),
        ("B: Paris", None, None, None, "B"),
        ("Paris", None, None, None, "B"),
        ("It must be this one:\n\nB", None, None, None, "B"),
        ("B. subtilis is a bacterium", None, None, None, None),
        ("A dog", None, None, None, None),
        ("I am not sure", None, None, None, None),
        ("", None, None, None, None),
        ("\x00\ud800", None, None, None, None),
    ],
)
def test_a_choice_is_read_as_its_mode_says(
    text: str, strict: str | None, boxed: str | None, colon: str | None, lenient: str | None
) -> None:
    assert [chosen(text, OPTIONS, mode).letter for mode in MODES] == [strict, boxed, colon, lenient]


def test_options_with_the_same_text_are_not_chosen_by_it() -> None:
    assert chosen(r"\boxed{same}", {"A": "same", "B": "Same"}, "lenient") == Choice(None, "boxed")


def test_a_letter_is_no_choice_when_it_is_no_option() -> None:
    assert chosen("Answer: C", {"A": "yes", "B": "no"}, "lenient").letter is None


@given(st.text(alphabet="AaBbCc \n\\{}:.,()*`$box edanswerior"), st.sampled_from(MODES))
def test_any_text_gives_an_option_or_nothing(text: str, mode: GradingMode) -> None:
    assert chosen(text, OPTIONS, mode).letter in (*OPTIONS, None)


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from([" or ", " and ", ", ", "/", " & ", "; "]))
def test_two_letters_in_one_statement_are_no_choice(one: str, other: str, between: str) -> None:
    for statement in (rf"\boxed{{{one}{between}{other}}}", f"Answer: {one}{between}{other}"):
        for mode in MODES:
            assert chosen(statement, OPTIONS, mode).letter in ((None,) if one != other else (None, one))


@pytest.mark.parametrize(
    "unit", ["answer ", "answer is ", "answer :" + " " * 50, "\\boxed{", "B or ", "option ", " ", "(", "*", "B: "]
)
@pytest.mark.parametrize("mode", MODES)
def test_reading_takes_linear_time(unit: str, mode: GradingMode) -> None:
    text = unit * (5_000_000 // len(unit))
    started = time.perf_counter()
    chosen(text, OPTIONS, mode, [r"Answer\s*:\s*\s*([A-Z])"])
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"A": "yes", "B": "no"},
        [{"A": "yes"}, {"B": "no"}],
        [{"A": "yes", "B": "no"}],
        [{"a": "yes"}, {"b": "no"}, {"C": None}],
        ["yes", "no"],
    ],
)
def test_options_come_in_several_forms(options: object) -> None:
    assert task(options=options).options == {"A": "yes", "B": "no"}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"options": None}, "expected options as"),
        ({"options": "A, B"}, "expected options as"),
        ({"options": ["only one"]}, "at least 2 items"),
        ({"options": [{"A": "x"}, {"A": "y"}]}, "a letter of its own, found 'A'"),
        ({"options": {"AB": "x", "C": "y"}}, "a letter of its own, found 'AB'"),
        ({"options": {"A": 1, "B": 2}}, "valid string"),
        ({"options": [str(number) for number in range(27)]}, "at most 26 options, found 27"),
        ({"expected_answer": "E"}, "expected one of the letters A, B, C, D"),
        ({"expected_answer": ""}, "expected one of the letters"),
        ({"expected_answer": 1}, "valid string"),
        ({"grading_mode": "llm_judge"}, "'strict_single_letter_boxed', 'lenient_boxed', 'lenient_answer_colon' or 'lenient'"),
        ({"question": ""}, "expected a question or messages, found neither"),
        ({"template_metadata": {"output_regex": "(a+)+([A-Z])"}}, "expected an output_regex of plain text"),
        ({"template_metadata": {"output_regex": "(.*)*"}}, "expected an output_regex of plain text"),
        ({"template_metadata": {"output_regex": 5}}, "a pattern or a list of patterns"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused(fields: dict[str, object], found: str) -> None:
    with pytest.raises(Refused, match=found.replace("(", r"\(")):
        task(**fields)


def test_a_pattern_of_the_row_goes_before_its_mode() -> None:
    row = task(template_metadata={"output_regex": r"OPTION SELECTED:\s*([A-Za-z])"}, grading_mode=MODES[0])
    read = [
        chosen(text, row.options, row.grading_mode, row.template_metadata) for text in ("option selected:\n\n b", r"\boxed{C}")
    ]
    assert read == [Choice("B", "output_regex"), Choice("C", "boxed")]


@pytest.mark.parametrize(
    "pattern", [r"ANSWER IS\s*([A-Za-z])\s*", r"Answer\s*:\s*(?!Answer)\s*([A-Za-z])", r"\\boxed\{([A-Z])\}"]
)
def test_the_patterns_of_nemo_gym_are_simple_enough(pattern: str) -> None:
    assert task(template_metadata={"output_regex": [pattern]}).template_metadata == [pattern]


def test_a_question_is_shown_with_its_options_and_how_to_answer() -> None:
    (message,) = ENVIRONMENT.seed(task(grading_mode="lenient_answer_colon")).messages
    content = str(message["content"])
    assert content.startswith("Where?\n")
    assert "\nC: Rome\n" in content
    assert "Answer: X" in content
