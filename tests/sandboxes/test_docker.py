"""What only containers have: images with content, a root user, and an engine that may be away."""

import asyncio
import contextlib
import io
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import docker
import pytest

from rollstream.errors import Refused, SandboxUnavailable
from rollstream.sandboxes.docker import DockerProvider
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.testing.boxes import BoxMaking, sh

pytestmark = pytest.mark.docker
ENGINE = "/var/run/docker.sock"


class Boxes(BoxMaking):
    def __init__(self, image: str, host: str | None = None) -> None:
        self._image = image
        self._host = host

    def provider(self) -> SandboxProvider:
        return DockerProvider("agent", image=self._image, host=self._host)


@pytest.fixture
def image_with_a_project(sandbox_image: str) -> Iterator[str]:
    """An image whose work directory is root's and holds a file."""
    client = docker.from_env()
    tag = f"rollstream-test-project:{uuid4().hex[:8]}"
    container = client.containers.create(sandbox_image, ["true"])
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        entry = tarfile.TarInfo("opt/project/src/module.py")
        entry.size, entry.mode = len(b"bug = True\n"), 0o644
        tar.addfile(entry, io.BytesIO(b"bug = True\n"))
    container.put_archive("/", raw.getvalue())
    container.commit(*tag.split(":"))
    container.remove()
    client.close()
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)


async def test_what_the_image_has_in_the_work_directory_is_there_and_can_be_changed(image_with_a_project: str) -> None:
    async with Boxes(image_with_a_project).box(workdir="/opt/project") as box:
        done = await sh(box, "pwd; cat src/module.py; sed -i s/True/False/ src/module.py && cat src/module.py")
        assert done.stdout.text == "/opt/project\nbug = True\nbug = False\n", done


async def test_root_has_no_rights_and_cannot_end_the_box(sandbox_image: str) -> None:
    async with Boxes(sandbox_image).box() as box:
        assert (await box.exec(["id", "-u"], user="root")).stdout.text == "0\n"
        await sh(box, "echo agents > mine; chmod 600 mine")
        assert not (await sh(box, "cat mine", user="root")).ok
        timed = await sh(box, "kill -9 -1; setsid sleep 4711 & sleep 100", user="root", timeout_s=2)
        assert timed.timed_out
        assert "4711" not in (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.text


async def test_without_a_disk_limit_the_image_itself_can_be_written_where_it_lets_the_user(sandbox_image: str) -> None:
    async with Boxes(sandbox_image).box(disk_mib=None) as box:
        assert (await sh(box, "touch here && touch /home/agent/x")).ok
        assert not (await sh(box, "touch /usr/x")).ok


async def test_an_image_that_is_nowhere_is_said_and_nothing_is_left(sandbox_image: str) -> None:
    boxes = Boxes("rollstream-test-no-such-image")
    async with boxes.providing() as provider:
        box = await boxes.made(provider)
        # Refused by a registry, or no registry to ask: the second can pass.
        with pytest.raises((Refused, SandboxUnavailable), match=r"rollstream-test-no-such-image|registry|lookup|dial"):
            await box.start()
        assert box.id not in {found.id for found in await provider.found()}


async def test_an_engine_that_is_not_there_is_named_and_can_be_tried_again(tmp_path: Path) -> None:
    provider = DockerProvider("verification", host=f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SandboxUnavailable, match=f"no Docker engine answers at unix://{tmp_path}") as raised:
        await provider.enforces()
    await provider.close()
    assert (raised.value.stage, raised.value.retryable) == ("verification", True)


@contextlib.asynccontextmanager
async def engine_through(path: Path) -> AsyncIterator[asyncio.Event]:
    """The engine behind another socket, until the event is set."""
    writers: list[asyncio.StreamWriter] = []
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_unix_connection(ENGINE)
        writers.extend([writer, theirs[1]])
        pumps.update({asyncio.create_task(pump(reader, theirs[1])), asyncio.create_task(pump(theirs[0], writer))})

    async def cut() -> None:
        await gone.wait()
        server.close()
        for writer in writers:
            writer.transport.abort()

    gone = asyncio.Event()
    server = await asyncio.start_unix_server(serve, path)
    cutting = asyncio.create_task(cut())
    yield gone
    gone.set()
    await cutting
    await asyncio.gather(*pumps, return_exceptions=True)


async def test_an_engine_that_goes_away_under_a_command_fails_no_command(sandbox_image: str, tmp_path: Path) -> None:
    boxes, direct = Boxes(sandbox_image, f"unix://{tmp_path}/engine"), Boxes(sandbox_image)
    away = asyncio.Event()

    async def listen(stream: str, chunk: bytes) -> None:
        away.set()

    async with engine_through(tmp_path / "engine") as gone, boxes.providing() as provider, direct.providing() as other:
        box = await boxes.made(provider)
        await box.start()
        call = asyncio.create_task(sh(box, "echo away; sleep 100", on_output=listen))
        async with asyncio.timeout(60):
            await away.wait()
        gone.set()
        with pytest.raises(SandboxUnavailable, match="engine"):
            await call
        await other.destroy(box.id)
