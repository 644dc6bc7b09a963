"""What model calls cost: by the prices in the settings of whoever asks, else as the calls said themselves.

Prices are in no event: they change, tokens do not. What a call said that it cost is in its event, and is never added to what
prices make of tokens: the one is in US dollars, the other in whatever currency the settings mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.settings import ModelSettings, Settings


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in whatever currency the settings mean."""

    input: float
    output: float
    cached: float

    @classmethod
    def of(cls, model: ModelSettings) -> "Price | None":
        """None unless both directions have a price: half a bill misleads."""
        given, taken = model.price_per_million_input, model.price_per_million_output
        if given is None or taken is None:
            return None
        cached = model.price_per_million_cached
        return cls(given, taken, given if cached is None else cached)

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> float:
        """`prompt_tokens` hold the cached ones, as OpenAI counts them."""
        cached = min(cached_tokens, prompt_tokens)
        fresh = prompt_tokens - cached
        return (fresh * self.input + cached * self.cached + completion_tokens * self.output) / 1_000_000


def prices_in(settings: Settings) -> dict[str, Price]:
    """Every model that has a price: by its name in the settings, and by the id that its server knows."""
    found: dict[str, Price] = {}
    for name, model in settings.models.items():
        if (price := Price.of(model)) is not None:
            found[name] = price
            if model.model:
                found.setdefault(model.model, price)
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """The calls of one model in one role, every try included."""

    role: str
    model: str
    """Its name in the settings of the run, where that is known, else what the server called itself."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float | None
    """Null where the settings name no price for it."""
    cost_usd: float | None
    """What its calls said that they cost; null where none said, and where the settings name a price, which goes before."""
    costs_told: int
    """How many of its calls said what they cost. Where those are not all, `cost_usd` is the least that was paid."""


def usage_of(rows: Sequence[Mapping[str, Any]], models: Mapping[str, str], prices: Mapping[str, Price]) -> tuple[Usage, ...]:
    """Rows by role and model, with what they cost.

    Args:
        models: role -> name of its model in the settings, from the run's manifest.
    """
    found: dict[tuple[str, str], list[tuple[Mapping[str, Any], Price | None]]] = {}
    for row in rows:
        role = row["role"] or "unknown"
        named = row["policy"] if role == "policy" else models.get(role)
        model = named or row["served"] or "unknown"
        price = prices.get(named or "") or prices.get(row["served"] or "")
        found.setdefault((role, model), []).append((row, price))
    return tuple(_usage(role, model, priced) for (role, model), priced in found.items())


_COUNTS = ("calls", "prompt_tokens", "completion_tokens", "cached_tokens", "costs_told")


def _usage(role: str, model: str, rows: Sequence[tuple[Mapping[str, Any], Price | None]]) -> Usage:
    costs = [price.cost(row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) for row, price in rows if price]
    priced = len(costs) == len(rows)
    return Usage(
        role,
        model,
        cost=sum(costs) if priced else None,
        cost_usd=None if priced else sum_of_known(row["cost_usd"] for row, _ in rows),
        **{name: sum(row[name] for row, _ in rows) for name in _COUNTS},
    )


def sum_of_known(costs: Iterable[float | None]) -> float | None:
    """None where none is known."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None
