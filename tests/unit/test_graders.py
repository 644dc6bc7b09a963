"""The pool of graders: deadlines, deaths and what it leaves behind."""

import asyncio
import math
import operator
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import GraderCrashed, GraderRaised, GraderTimeout
from rollstream.environments.symbolic import symbolically_equal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="graders need POSIX timers")


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_function_runs_in_another_process_that_stays() -> None:
    async with GraderPool(1, 5.0) as pool:
        first, second = await pool.run(os.getpid), await pool.run(os.getpid)
    assert first == second != os.getpid()


async def test_children_start_when_they_are_needed() -> None:
    async with GraderPool(4, 5.0) as pool:
        assert pool.pids() == []
        assert await pool.run(operator.add, 1, 2) == 3
        assert len(pool.pids()) == 1


async def test_a_function_past_its_deadline_is_killed_and_its_child_replaced() -> None:
    async with GraderPool(1, 0.3) as pool:
        pid = await pool.run(os.getpid)
        with pytest.raises(GraderTimeout, match=r"within 0\.3 s"):
            await pool.run(time.sleep, 60)
        assert not alive(pid)
        assert await pool.run(os.getpid) != pid


async def test_a_function_that_never_leaves_c_code_is_killed_too() -> None:
    async with GraderPool(1, 0.3) as pool:
        with pytest.raises(GraderTimeout):
            await pool.run(math.factorial, 30_000_000)


async def test_the_deadline_counts_execution_and_not_queueing() -> None:
    async with GraderPool(1, 1.0) as pool:
        started = time.monotonic()
        await asyncio.gather(*(pool.run(time.sleep, 0.4) for _ in range(4)))
        assert time.monotonic() - started > 1.5


async def test_no_more_run_at_once_than_there_are_processes() -> None:
    async with GraderPool(2, 5.0) as pool:
        pids = await asyncio.gather(*(pool.run(os.getpid) for _ in range(20)))
    assert 1 <= len(set(pids)) <= 2


async def test_a_crash_is_told_from_a_timeout_and_the_child_is_replaced() -> None:
    async with GraderPool(1, 5.0) as pool:
        with pytest.raises(GraderCrashed, match="exit code 3") as crash:
            await pool.run(os._exit, 3)
        assert crash.value.retryable
        assert await pool.run(operator.add, 1, 1) == 2


async def test_an_idle_child_that_dies_is_replaced() -> None:
    async with GraderPool(1, 5.0) as pool:
        os.kill(await pool.run(os.getpid), signal.SIGKILL)
        await until(lambda: pool.pids() == [])
        assert await pool.run(operator.add, 1, 1) == 2


async def test_an_exception_is_a_bug_of_the_grader_and_keeps_its_child() -> None:
    async with GraderPool(1, 5.0) as pool:
        pid = await pool.run(os.getpid)
        with pytest.raises(GraderRaised, match="truediv raised ZeroDivisionError") as bug:
            await pool.run(operator.truediv, 1, 0)
        assert not bug.value.retryable
        assert await pool.run(os.getpid) == pid


async def test_only_json_comes_back() -> None:
    async with GraderPool(1, 5.0) as pool:
        with pytest.raises(GraderRaised, match="TypeError"):
            await pool.run(complex, 1, 2)


async def test_a_grader_that_prints_or_reads_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    async with GraderPool(1, 5.0) as pool:
        await pool.run(eval, "print('noise', flush=True)")
        assert await pool.run(eval, "__import__('sys').stdin.read()") == ""
        assert await pool.run(operator.add, 1, 1) == 2
    assert capfd.readouterr().err == "noise\n"


async def test_a_grader_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_SEALING_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with GraderPool(1, 5.0) as pool:
        assert "secret" not in str(await pool.run(eval, "dict(__import__('os').environ)"))


async def test_a_grader_imports_nothing_of_the_application() -> None:
    async with GraderPool(1, 5.0) as pool:
        await pool.run(operator.add, 1, 1)
        modules: list[str] = await pool.run(eval, "sorted(__import__('sys').modules)")
    assert {"rollstream", "schemas", "pydantic", "services", "asyncio"}.isdisjoint(modules)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
async def test_a_grader_that_wants_all_memory_gets_an_error() -> None:
    async with GraderPool(1, 5.0, memory_mib=256) as pool:
        with pytest.raises(GraderRaised, match="MemoryError"):
            await pool.run(bytearray, 1 << 30)


async def test_preparation_does_not_count_towards_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import time
        prepared = 0
        def prepare_grading():
            global prepared
            time.sleep(0.8)
            prepared += 1
        def preparations():
            return prepared
    """
    (tmp_path / "slow_to_prepare.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_to_prepare  # type: ignore[import-not-found]

    async with GraderPool(1, 0.4) as pool:
        assert await pool.run(slow_to_prepare.preparations) == 1
        assert await pool.run(slow_to_prepare.preparations) == 1


async def test_a_cancelled_call_kills_its_child() -> None:
    async with GraderPool(1, 60.0) as pool:
        call = asyncio.create_task(pool.run(time.sleep, 60))
        await until(lambda: pool.pids() != [])
        (pid,) = pool.pids()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not alive(pid)
        assert await pool.run(operator.add, 1, 1) == 2


async def test_closing_ends_running_and_waiting_calls() -> None:
    pool = GraderPool(1, 60.0)
    await pool.start()
    calls = [asyncio.create_task(pool.run(time.sleep, 60)) for _ in range(3)]
    await until(lambda: pool.pids() != [])
    pids = pool.pids()
    await pool.close()
    ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5.0)
    assert [type(end) for end in ends] == [GraderCrashed] * 3
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(GraderCrashed, match="closed"):
        await pool.run(operator.add, 1, 1)


def test_no_child_outlives_a_parent_that_is_killed() -> None:
    script = """
        import asyncio, os, time
        from rollstream.environments.graders import GraderPool
        async def main():
            async with GraderPool(2, 2.0) as pool:
                idle, _ = await asyncio.gather(pool.run(os.getpid), pool.run(time.sleep, 0.2))
                asyncio.create_task(pool.run(eval, "[None for _ in iter(int, 1)]"))
                await asyncio.sleep(0.3)
                print(*pool.pids(), flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline, "a grader outlived its parent"
        time.sleep(0.05)


def test_the_pool_works_under_uvloop() -> None:
    async def main() -> tuple[int, bool]:
        async with GraderPool(1, 0.3) as pool:
            with pytest.raises(GraderTimeout):
                await pool.run(time.sleep, 60)
            return await pool.run(operator.add, 1, 1), await pool.run(symbolically_equal, "x+1", "1+x")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == (2, True)
