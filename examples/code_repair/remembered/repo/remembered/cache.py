"""`@remembered` keeps what a function returned, for as many calls as it is told."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


def remembered(size: int = 128) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Remember the results of the `size` calls that were made or asked for last."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        results: OrderedDict[Any, Any] = OrderedDict()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            key = args
            if results.get(key):
                return results[key]
            result = function(*args, **kwargs)
            results[key] = result
            if len(results) > size:
                results.popitem(last=False)
            return result

        call.forget = results.clear  # type: ignore[attr-defined]
        return call

    return decorate
