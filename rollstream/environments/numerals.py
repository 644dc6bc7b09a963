r"""Plain numbers as people write them: `$1,234.50`, `3/4`, `\frac{3}{4}`, `12.5\%`, `18 dollars`.

Sound before complete: what is not certainly one plain number is None, and somebody slower decides. Values are exact
fractions, so `0.75` is `3/4` and `0.333` is not `1/3`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rollstream.environments.answers import unwrapped

MAX_LENGTH = 400
"""Of a number with its unit. Longer ones are left to a process that can be killed."""

_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|~|\u00a0|\u202f")
_STYLED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s?(?P<currency>[$€£¥₹]?)\s?(?P<inner_sign>-?)
        (?: (?P<whole>\d+)\s(?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)
          | (?P<tex_whole>\d*)\s?\\frac\s?
            (?: \{{\s?(?P<tex_sign>-?)(?P<tex_top>\d+)\s?\}}\s?\{{\s?(?P<tex_bottom>\d+)\s?\}}
              | (?P<short_top>\d)\s?(?P<short_bottom>\d) )
          | (?P<top>{_DECIMAL})\s?/\s?(?P<bottom>\d+(?:\.\d+)?)
          | (?P<decimal>{_DECIMAL})
            (?: [eE](?P<exponent>[-+]?\d{{1,2}})
              | \s?(?:\\times|\\cdot|\u00d7|\*)\s?10\s?\^\s?(?:(?P<digit>\d)(?!\d)|\{{(?P<power>-?\d{{1,2}})\}}) )?
        )
        (?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_PERCENT = re.compile(r"\s?(?:%|percent\b|per\scent\b)", re.IGNORECASE)
_SHORT_UNIT = r"(?:[kcmdnu]?m|km/h|mph|kph|[km]?g|lbs?|oz|[mcd]?[lL]|ft|in|yd|mi|hrs?|h|mins?|s|secs?|ms|USD|EUR|GBP|kWh|Hz)"
_UNIT = re.compile(
    rf"\s?(?:\^?\s?\{{?\s?\\circ\s?\}}?|°|{_SHORT_UNIT}(?:\s?\^?\{{?[23]\}}?)?|(?:\s(?:[A-Za-z-]{{3,20}}|of|in|at|on)(?:\s?/\s?[A-Za-z]{{2,20}})?){{1,6}})?\s?\.?"
)
_NOT_UNITS = frozenset(
    """pi sqrt root roots sin cos tan cot sec csc log exp mod modulo factorial squared cubed plus minus times over
    divided choose nor not than less more fewer hundred hundreds thousand thousands million millions billion
    billions trillion trillions dozen dozens score half halves third thirds quarter quarters fourth fourths
    fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths base
    binary octal hex hexadecimal infinity inf negative frac cdot theta alpha beta gamma lambda sigma omega phi
    approximately about almost nearly remainder power""".split()  # noqa: SIM905
)
"""Words that make another number of the one before them, or a formula."""


@dataclass(frozen=True, slots=True)
class Numeral:
    """One plain number."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    def matches(self, reference: "Numeral") -> bool | None:
        """Whether this answers `reference`; None when the numbers agree and the units may not.

        A percentage equals both its fraction and the bare number before the sign, since `20` is how a percentage is often
        asked for. A unit that the reference does not ask for is ignored.
        """
        same = self.value == reference.value
        if self.percent != reference.percent:
            share, plain = (self, reference) if self.percent else (reference, self)
            same = same or share.value == plain.value * 100
        return None if same and reference.unit not in ("", self.unit) else same


def numeral(text: str) -> Numeral | None:
    """The plain number that `text` is, or None."""
    if len(text) > MAX_LENGTH:
        return None
    found = _NUMBER.fullmatch(tidy(text))
    value = _value(found) if found else None
    if found is None or value is None:
        return None
    rest = found["rest"]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    words = re.findall(r"[a-z]+", rest.lower())
    if not _UNIT.fullmatch(rest) or not _NOT_UNITS.isdisjoint(words):
        return None
    return Numeral(value, percent is not None, " ".join(word.removesuffix("s") for word in words))


def tidy(text: str) -> str:
    r"""`text` without what only styles a formula, so that equal formulas are more often equal texts."""
    text = unwrapped(text).replace("\u2212", "-").replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%")
    text = _STYLED.sub(r" \1 ", _SPACING.sub(" ", text)).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    return " ".join(text.split()).rstrip(",;")


def _value(found: re.Match[str]) -> Fraction | None:
    group = found.groupdict()
    if group["sign"] and group["inner_sign"]:
        return None
    try:
        value = _magnitude(group)
    except ZeroDivisionError:
        return None
    return -value if "-" in (group["sign"], group["inner_sign"]) else value


def _magnitude(group: dict[str, str | None]) -> Fraction:
    def number(name: str) -> Fraction:
        return Fraction((group[name] or "0").replace(",", "").rstrip(".") or "0")

    if group["whole"]:
        return number("whole") + number("mixed_top") / number("mixed_bottom")
    if group["tex_top"]:
        return number("tex_whole") + number("tex_top") / number("tex_bottom") * (-1 if group["tex_sign"] else 1)
    if group["short_top"]:
        return number("tex_whole") + number("short_top") / number("short_bottom")
    if group["top"]:
        return number("top") / number("bottom")
    exponent = int(group["exponent"] or group["digit"] or group["power"] or 0)
    return number("decimal") * Fraction(10) ** exponent
