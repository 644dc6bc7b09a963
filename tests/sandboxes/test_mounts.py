"""Programs of the machine in boxes: readable, runnable, and nothing else; and which providers have none."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from rollstream.errors import Refused
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sandboxes.docker import DockerProvider
from rollstream.sandboxes.local import LocalProvider
from rollstream.sandboxes.protocol import Mount, SandboxProvider
from rollstream.settings import CliSettings
from rollstream.testing.boxes import TAG, fitting, sh
from schemas.sandbox import SandboxSpec
from services.agent_worker.boxes import program_of


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker])])
def provider(request: pytest.FixtureRequest) -> SandboxProvider:
    request.getfixturevalue("bubblewrap")
    if request.param == "bubblewrap":
        return BubblewrapProvider("agent")
    return DockerProvider("agent", image=request.getfixturevalue("sandbox_image"))


@pytest.fixture
def program() -> Iterator[Path]:
    """A directory with a program, where every user gets to: not in pytest's own, which is its owner's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "bin" / "claude").write_text("#!/bin/sh\necho I am here\n")
        for path in (folder, folder / "bin", folder / "bin" / "claude"):
            path.chmod(0o755)
        yield folder


async def test_a_program_of_the_machine_runs_in_a_box_and_cannot_be_changed(provider: SandboxProvider, program: Path) -> None:
    mount, argv0 = program_of("claude_code", CliSettings(path=str(program)))
    assert mount is not None
    spec = SandboxSpec(**fitting(await provider.enforces()))
    box = provider.create(f"test-{uuid4().hex[:12]}", spec, TAG, mounts=[mount])
    try:
        await box.start()
        ran = await box.exec([argv0])
        assert (ran.exit_code, ran.stdout.text) == (0, "I am here\n")
        for change in (f"echo x > {argv0}", f"rm {argv0}", f"touch {mount.target}/more"):
            assert not (await sh(box, change)).ok, change
        assert (await box.exec([argv0])).stdout.text == "I am here\n"
    finally:
        await box.close()
        await provider.close()


async def test_local_mounts_nothing_and_says_so(tmp_path: Path) -> None:
    spec = SandboxSpec(cpus=None, memory_mib=None, pids=None, disk_mib=None, network="public")
    box = LocalProvider("agent", state_dir=tmp_path).create("test-mounts", spec, TAG, mounts=[Mount(tmp_path, "/opt/x")])
    with pytest.raises(Refused, match="local mounts nothing"):
        await box.start()


def test_a_program_is_found_by_itself_or_in_its_directory(program: Path) -> None:
    inside = "/opt/rollstream/claude_code/bin/claude"
    assert program_of("claude_code", CliSettings(path=str(program))) == (Mount(program, "/opt/rollstream/claude_code"), inside)
    one = program / "bin" / "claude"
    alone = "/opt/rollstream/claude_code/claude"
    assert program_of("claude_code", CliSettings(path=str(one))) == (Mount(one, alone), alone)
    assert program_of("claude_code", CliSettings()) == (None, "claude")
    assert program_of("noop", None) == (None, "")


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_program_that_is_not_there_is_refused_by_the_settings_name(path: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"at harnesses\.codex\.path, found .*: correct the path"):
        program_of("codex", CliSettings(path=str(tmp_path / path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only as root is a box another user's")
async def test_a_program_that_a_boxs_user_cannot_get_to_is_refused_with_what_is_in_the_way(
    program: Path, bubblewrap: None
) -> None:
    (program / "bin").chmod(0o700)
    mount = Mount(program / "bin" / "claude", "/opt/x/claude")
    box = BubblewrapProvider("agent").create("test-closed", SandboxSpec(), TAG, mounts=[mount])
    with pytest.raises(Refused, match=f"found {program}/bin closed"):
        await box.start()
