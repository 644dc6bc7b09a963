"""Call a function on many items with a few threads."""

import threading
from collections.abc import Callable, Iterable
from queue import Empty, Queue
from typing import Any


def in_parallel(function: Callable[[Any], Any], items: Iterable[Any], workers: int = 4) -> list[Any]:
    """The results of `function` for all items, in the order of the items.

    Raises:
        Exception: what a call raised, of the first item whose call did; calls that have not begun are not made then.
    """
    waiting: Queue[Any] = Queue()
    for item in items:
        waiting.put(item)
    results: list[Any] = []

    def work() -> None:
        while True:
            try:
                item = waiting.get_nowait()
            except Empty:
                return
            results.append(function(item))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
