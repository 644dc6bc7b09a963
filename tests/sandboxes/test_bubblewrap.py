"""What only boxes of bubblewrap have: users of their own, who must be able to pass where their files lie."""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest

from rollstream.errors import SandboxUnavailable
from rollstream.sandboxes.bubblewrap import BubblewrapProvider, private_above
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.testing.boxes import PATIENCE_S, BoxMaking, sh


class Boxes(BoxMaking):
    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir

    def provider(self) -> SandboxProvider:
        return BubblewrapProvider("agent", state_dir=self._state_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's boxes have users of their own")
async def test_what_lies_in_a_private_directory_is_refused_with_its_name_and_what_to_do(
    bubblewrap: None, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    boxes = Boxes(private / "state")
    async with boxes.providing() as provider:
        box = await boxes.made(provider)
        with pytest.raises(SandboxUnavailable, match=r"which only its owner may pass.*`chmod o\+x /"):
            await box.start()
        assert await provider.found() == []


def test_the_first_private_directory_on_the_way_is_named(tmp_path: Path) -> None:
    base = Path("/tmp") / f"rollstream-test-{os.getpid()}"
    (base / "open" / "private" / "deeper").mkdir(parents=True)
    try:
        for folder in (base, base / "open"):
            folder.chmod(0o755)
        (base / "open" / "private").chmod(0o700)
        own = os.geteuid()
        assert private_above(base / "open" / "private" / "deeper" / "file", own + 1) == base / "open" / "private"
        assert private_above(base / "open" / "private" / "deeper" / "file", own) is None
        assert private_above(base / "open" / "file", own + 1) is None
    finally:
        for folder in (base / "open" / "private" / "deeper", base / "open" / "private", base / "open", base):
            folder.rmdir()


async def test_a_box_outlives_a_command_that_kills_all_it_can_without_a_pause(bubblewrap: None) -> None:
    async with Boxes(None).box() as box:
        await sh(box, "while :; do kill -9 -1; done", timeout_s=2)
        assert (await sh(box, "echo here")).stdout.text == "here\n"


async def test_boxes_that_start_close_nothing_of_anybody_elses(bubblewrap: None) -> None:
    boxes = Boxes(None)
    opened: list[int] = []

    async def open_files() -> None:
        while True:
            opened.extend(os.pipe())
            await asyncio.sleep(0.001)

    others = asyncio.create_task(open_files())
    try:
        async with boxes.box(), boxes.box():
            pass
    finally:
        others.cancel()
    closed = []
    for fd in opened:
        try:
            os.close(fd)
        except OSError:
            closed.append(fd)
    assert len(opened) > 20
    assert closed == []


async def test_hundreds_of_commands_leave_no_process_and_no_file_behind(bubblewrap: None) -> None:
    boxes = Boxes(None)
    async with boxes.providing() as provider:
        box = await boxes.made(provider)
        await box.start()
        try:
            assert (await box.exec(["true"])).ok
            before = len(open_files())
            (door,) = [child for child in psutil.Process().children() if "enter.py" in " ".join(child.cmdline())]
            room = asyncio.Semaphore(20)

            async def run(number: int) -> str:
                async with room:
                    return (await box.exec(["sh", "-c", "cat; echo $N"], stdin=b"in ", env={"N": str(number)})).stdout.text

            said = await asyncio.gather(*map(run, range(300)))
            assert said == [f"in {number}\n" for number in range(300)]
            assert door.children() == []
            assert len(open_files()) == before
        finally:
            await box.close()
    assert not door.is_running()


async def test_a_door_that_died_is_opened_again(bubblewrap: None) -> None:
    boxes = Boxes(None)
    async with boxes.providing() as provider:
        box = await boxes.made(provider)
        await box.start()
        try:
            assert (await box.exec(["true"])).ok
            (door,) = [child for child in psutil.Process().children() if "enter.py" in " ".join(child.cmdline())]
            door.kill()
            async with asyncio.timeout(PATIENCE_S):
                while door.is_running() and door.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.01)
            # Who has not heard of it yet is told that the box failed, which is tried again.
            with contextlib.suppress(SandboxUnavailable):
                await box.exec(["true"])
            assert (await box.exec(["echo", "again"])).stdout.text == "again\n"
        finally:
            await box.close()


async def test_a_command_that_is_too_long_for_the_door_is_told(bubblewrap: None) -> None:
    async with Boxes(None).box() as box:
        with pytest.raises(SandboxUnavailable, match="of at most 196608 bytes"):
            await box.exec(["true"], env={"LONG": "x" * 200_000})
        assert (await box.exec(["sh", "-c", 'echo "${#LONG}"'], env={"LONG": "x" * 100_000})).stdout.text == "100000\n"


def open_files() -> list[Path]:
    """What this process has open, but for what reading that takes."""
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()]
