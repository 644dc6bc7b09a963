r"""Finding the final answer in what an agent wrote.

Every function looks at a bounded piece of text and takes linear time: the text is written by somebody who is rewarded for it.
"""

import re

TAIL = 20_000
"""Characters from the end that are looked at. A final answer stands at the end; megabytes before it cost nothing."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox)\s{0,3}\{([^{}]*)\}")


def tail(text: str) -> str:
    return text[-TAIL:]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}`, braces inside it balanced; None without one, or when it is never closed."""
    opening = None
    for opening in _BOX.finditer(text):  # noqa: B007
        pass
    if opening is None:
        return None
    depth, at = 1, opening.end()
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[opening.end() : at].strip()
        at += 1
    return None


def unwrapped(text: str) -> str:
    r"""`text` without the markup that only styles it: `\text{…}` and its like, dollar signs, Markdown emphasis."""
    text = text.strip().strip("*_`").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    whole = _WRAPPER.fullmatch(text)
    return whole.group(1).strip() if whole else text
