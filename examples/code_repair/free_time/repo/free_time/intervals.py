"""Times that are taken, and what is left of a day. An interval has its start and not its end."""

Interval = tuple[int, int]


def merged(intervals: list[Interval]) -> list[Interval]:
    """The same times as intervals that neither touch nor overlap, in order; empty ones are left out."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def free(taken: list[Interval], day: Interval, at_least: int = 1) -> list[Interval]:
    """The gaps of a day that last long enough."""
    gaps: list[Interval] = []
    at = day[0]
    for start, end in merged(taken):
        if start - at > at_least:
            gaps.append((at, start))
        at = end
    if day[1] - at > at_least:
        gaps.append((at, day[1]))
    return gaps
