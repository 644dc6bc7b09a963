"""What a test waits for when its time is over: the stacks of its tasks, which the one of its thread does not tell."""

import asyncio
import gc
import inspect
import io
from types import TracebackType

MOST_TASKS = 200


def stacks(traceback: TracebackType | None) -> str:
    """The stacks of all unfinished tasks of the event loop that a traceback went through; nothing if it went through none."""
    text = io.StringIO()
    for task in sorted(_tasks(traceback), key=asyncio.Task.get_name)[:MOST_TASKS]:
        text.write(f"{task.get_name()}: {task.get_coro()}\n")
        _write(task.get_coro(), text)
    return text.getvalue()


def _tasks(traceback: TracebackType | None) -> set["asyncio.Task[object]"]:
    while traceback is not None:
        loop = traceback.tb_frame.f_locals.get("self")
        if isinstance(loop, asyncio.AbstractEventLoop):
            return asyncio.all_tasks(loop)
        traceback = traceback.tb_next
    return set()


def _write(waits: object, text: io.StringIO) -> None:
    """Down to what is waited for: a task's own stack ends at the first asynchronous generator."""
    while waits is not None:
        if inspect.iscoroutine(waits):
            frame, waits = waits.cr_frame, waits.cr_await
        elif inspect.isasyncgen(waits):
            frame, waits = waits.ag_frame, waits.ag_await
        elif inspect.isgenerator(waits):
            frame, waits = waits.gi_frame, waits.gi_yieldfrom
        else:
            # The step of such a generator tells nobody whose it is, but Python's collector.
            within = [one for one in gc.get_referents(waits) if inspect.isasyncgen(one) or inspect.iscoroutine(one)]
            if not within:
                text.write(f"    {str(waits)[:300]}\n")
            waits = within[0] if within else None
            continue
        if frame is not None:
            text.write(f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}\n")
