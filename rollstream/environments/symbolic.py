r"""Whether two formulas are equal, by math-verify. Runs in a grader's process, because sympy may never come back.

Importing this costs nothing: sympy comes in with `prepare_grading`, in the grader's process and outside its deadline.
"""

import logging

TOLERANCE = 1e-6
"""Relative. Numbers further apart than this are different whatever algebra says; math-verify itself rounds to 6 decimals."""


def prepare_grading() -> None:
    """Import sympy and build its parsers."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    symbolically_equal("x+1", "1+x")


def symbolically_equal(reference: str, answer: str) -> bool:
    r"""Compare two formulas in LaTeX or plain notation, without delimiters around them.

    What cannot be parsed is unequal to everything but its own text. math-verify's own alarms are off: they would reset the
    deadline of this process, and cannot interrupt C code.

    Source: math-verify, Hugging Face (2025).
    """
    import math_verify

    gold, target = (math_verify.parse(rf"\boxed{{{formula}}}", parsing_timeout=None) for formula in (reference, answer))
    if not gold or not target or _far_apart(gold[0], target[0]):
        return False
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


def _far_apart(gold: object, target: object) -> bool:
    """Whether both are numbers, and clearly not the same: simplifying their difference could take minutes."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(gold, sympy.Expr) or not isinstance(target, sympy.Expr) or gold.free_symbols or target.free_symbols:
        return False
    if gold.has(sympy.UnevaluatedExpr) or target.has(sympy.UnevaluatedExpr):
        return False  # a percentage, which also equals the number before its sign
    try:
        distance, size = abs(sympy.N(gold - target, 20)), abs(sympy.N(gold, 20))
        return bool(distance > TOLERANCE * max(1, size))
    except (TypeError, ValueError, ArithmeticError):
        return False
