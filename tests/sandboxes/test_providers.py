"""The shipped sandbox providers pass the suite that plug-ins inherit."""

from pathlib import Path

import pytest

from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sandboxes.docker import DockerProvider
from rollstream.sandboxes.local import LocalProvider
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.testing.sandboxes import SandboxConformance


@pytest.mark.docker
class TestDocker(SandboxConformance):
    @pytest.fixture(autouse=True)
    def _engine(self, sandbox_image: str) -> None:
        self._image = sandbox_image

    def provider(self) -> SandboxProvider:
        return DockerProvider("agent", image=self._image)


class TestBubblewrap(SandboxConformance):
    @pytest.fixture(autouse=True)
    def _program(self, bubblewrap: None) -> None:
        pass

    def provider(self) -> SandboxProvider:
        return BubblewrapProvider("agent")


class TestLocal(SandboxConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._state_dir = tmp_path

    def provider(self) -> SandboxProvider:
        return LocalProvider("agent", state_dir=self._state_dir)
