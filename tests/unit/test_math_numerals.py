"""Plain numbers: complete enough to spare the grader, and never equal when they are not."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, strategies as st

from rollstream.environments.math import compare
from rollstream.environments.numerals import numeral


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-18", -18),
        ("\u22125", -5),
        ("+5", 5),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1{,}234", 1234),
        ("$18.00", 18),
        (r"\$18", 18),
        ("-$5", -5),
        ("$-5", -5),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1.5e3", 1500),
        (r"1.5 \times 10^3", 1500),
        (r"1.5 \times 10^{-3}", Fraction(15, 10_000)),
        (r"\(18\)", 18),
        ("$18$", 18),
        (r"\text{18}", 18),
        ("**18**", 18),
        ("18 dollars per day", 18),
        (r"18\text{ cm}^2", 18),
        ("18cm", 18),
        ("60 km/h", 60),
        ("60 miles / hour", 60),
        ("90 degrees", 90),
        (r"90^\circ", 90),
        ("90\u00b0", 90),
        ("20%", 20),
        (r"12.5\%", Fraction(25, 2)),
    ],
)
def test_a_plain_number_has_its_value(text: str, value: Fraction) -> None:
    found = numeral(text)
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "text",
    [
     "", "x", "5x", "2ab", "2 ab", "5 million", "2 dozen", "3 thousand dollars", "2 pi", r"2\pi", "3 or 4", "3, 4",
     "1,23", "1.2.3", "2+2", "5!", "3 squared", "101 base two", "5 hours and 30 minutes", "--5", "- - 5", "1/0",
     "1/2/3", r"\frac{1}{0}", "10^6", "1.5 x 10^3", "1e400", "9" * 500, "1 2", "(5)", "5 = 5", "5 times", "half",
     "5i", "2e", "1/2 x", "5 less than x"
    ],
)  # fmt: skip
def test_what_is_not_certainly_one_plain_number_is_none(text: str) -> None:
    assert numeral(text) is None


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("1,000", "1000", True),
        ("0.75", r"\frac{3}{4}", True),
        ("1/3", "0.333333", False),
        ("20", "20%", True),
        ("0.2", r"20\%", True),
        ("20%", "0.2", True),
        ("20%", "20", True),
        ("20%", "2", False),
        ("18", "18 dollars", True),
        ("18 dollars", "18 dollar", True),
        ("5 km", "5 m", None),
        ("5 km", "5", None),
        ("5 km", "6 m", False),
        ("5", "x = 5", True),
        ("5", r"x \approx 5", True),
        ("5", "x = 5, y = 6", None),
        ("5", "y = x = 5", None),
        (r"\sqrt{ 2 }", r"\sqrt{2}", True),
        ("x + 1", "x+1", True),
        ("x+1", "1+x", None),
        ("7", "seven", None),
        ("5", "5 million", None),
    ],
)
def test_two_answers_are_compared_where_that_is_certain(reference: str, answer: str, equal: bool | None) -> None:
    assert compare(reference, answer) is equal


def decimal(value: Fraction, places: int) -> str:
    """`value` cut to so many places."""
    scaled = abs(value.numerator) * 10**places // value.denominator
    whole, rest = divmod(scaled, 10**places)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole:,}.{rest:0{places}d}" if places else f"{sign}{whole:,}"


rationals = st.builds(Fraction, st.integers(-(10**6), 10**6), st.sampled_from([1, 2, 4, 5, 8, 10, 3, 7]))
renderings = st.sampled_from(
    [
        lambda value: f"{value.numerator}/{value.denominator}",
        lambda value: rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
        lambda value: f"${value.numerator}/{value.denominator}$",
        lambda value: f"x = {value.numerator}/{value.denominator}",
        lambda value: f"{value.numerator}/{value.denominator} apples",
    ]
)


@given(rationals, renderings, renderings)
def test_the_same_number_in_two_notations_is_equal(value: Fraction, one: object, other: object) -> None:
    assert callable(one)
    assert callable(other)
    assert compare(one(value), other(value)) in (True, None)
    assert compare(one(value), f"{value.numerator}/{value.denominator}") in (True, None)


@given(rationals, rationals, renderings, renderings)
def test_different_numbers_are_never_equal(value: Fraction, another: Fraction, one: object, other: object) -> None:
    assume(value != another)
    assert callable(one)
    assert callable(other)
    assert compare(one(value), other(another)) in (False, None)


@given(rationals, st.integers(0, 8))
def test_a_decimal_equals_a_fraction_exactly_or_not_at_all(value: Fraction, places: int) -> None:
    text = decimal(value, places)
    exact = (value * 10**places).denominator == 1
    assume(exact or value >= 0 or abs(value) > 1)
    assert compare(f"{value.numerator}/{value.denominator}", text) is exact


numberish = st.text(alphabet="0123456789.,/-+ $%e{}\\frac", max_size=12)


@given(numberish, numberish)
def test_numberish_texts_are_equal_only_if_their_values_are(reference: str, answer: str) -> None:
    one, other = numeral(reference), numeral(answer)
    equal = compare(reference, answer)
    if equal and one and other:
        assert one.value in (other.value, other.value * 100, other.value / 100)
    if equal is False:
        assert one is not None
        assert other is not None


@given(st.from_regex(r"-?[0-9]{1,3}(,[0-9]{3}){0,2}(\.[0-9]{1,4})?", fullmatch=True))
def test_python_agrees_on_plain_decimals(text: str) -> None:
    found = numeral(text)
    assert found is not None
    assert found.value == Fraction(text.replace(",", ""))
