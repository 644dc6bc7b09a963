"""Sandbox providers by name, and the policies that none may run open."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollstream.cli.doctor import sandbox_check, sandbox_checks
from rollstream.errors import Refused, UsageError
from rollstream.reaping import SandboxKeeping
from rollstream.sandboxes import registry
from rollstream.sandboxes.cgroups import Cgroups, CgroupsUnusable, limits
from rollstream.sandboxes.docker import DockerProvider
from rollstream.settings import Defaults, SandboxSettings, Settings, WarmSettings
from schemas.sandbox import SandboxSpec
from tests.unit.test_reaper import Sink


def test_shipped_providers_load_by_name_and_by_setting() -> None:
    assert {"bubblewrap", "docker", "local"} <= set(registry.names())
    assert registry.load(SandboxSettings(provider="docker"), "agent").name == "docker"
    assert registry.load(SandboxSettings(provider="docker"), "agent", "bubblewrap").name == "bubblewrap"
    assert registry.load(SandboxSettings(provider="local", unsafe_local=True), "agent").name == "local"


def test_local_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(Refused, match=r"sandboxes\.unsafe_local"):
        registry.load(SandboxSettings(provider="local"), "agent")


def test_an_unknown_provider_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Refused, match=r"bubblewrap.*did you mean docker"):
        registry.load(SandboxSettings(provider="dokcer"), "verification")


def test_a_plug_in_that_does_not_load_or_has_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("broken", "no_such_module:Provider", registry.ENTRY_POINTS),
        EntryPoint("renamed", "tests.unit.test_sandbox_registry:as_docker", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [point for point in points if name in (None, point.name)]
    )
    assert "broken" in registry.names()
    with pytest.raises(Refused, match="no_such_module"):
        registry.load(SandboxSettings(provider="broken"), "agent")
    with pytest.raises(Refused, match="found one called docker"):
        registry.load(SandboxSettings(provider="renamed"), "agent")


def as_docker(settings: SandboxSettings, stage: str) -> DockerProvider:
    return DockerProvider("agent")


@pytest.mark.parametrize("host", ["ssh://somewhere", "https://somewhere:2376", "npipe:////./pipe/docker"])
def test_an_engine_that_commands_cannot_be_streamed_from_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="DOCKER_HOST"):
        DockerProvider("agent", host=host)


def test_a_policy_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        SandboxSpec.model_validate({"memory_mb": 100})


async def test_a_worker_whose_settings_name_an_unknown_provider_does_not_start() -> None:
    settings = Settings(sandboxes=SandboxSettings(provider="nonsense"))
    with pytest.raises(Refused, match="found 'nonsense'"):
        await SandboxKeeping(settings, Sink(), stage="agent", by="w").start()


async def test_boxes_are_kept_warm_by_the_worker_that_is_to_have_them_and_by_no_other() -> None:
    warm = {"few": WarmSettings(worker="agent_worker", provider="nonsense")}
    settings = Settings(bootstrap_servers="127.0.0.1:9", sandboxes=SandboxSettings(warm=warm))
    with pytest.raises(Refused, match="found 'nonsense'"):
        await SandboxKeeping(settings, Sink(), stage="agent", by="w", warm_of="agent_worker").start()
    for other in (None, "verifier_worker"):
        keeping = SandboxKeeping(settings, Sink(), stage="agent", by="w", warm_of=other)
        await keeping.start()
        await keeping.stop()


def test_the_doctor_tries_a_box_and_says_what_it_holds_or_what_is_wrong() -> None:
    allowed = Settings(sandboxes=SandboxSettings(provider="local", unsafe_local=True))
    refused = sandbox_check(Settings(sandboxes=SandboxSettings(provider="local")), "local")
    tried = sandbox_check(allowed, "local")
    assert (tried.mark, tried.name, tried.found) == ("ok", "sandboxes local", "holds no limits; networks public")
    assert refused.mark == "missing"
    assert "unsafe_local" in refused.found


def test_the_doctor_tries_every_backend_and_requires_those_that_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/engine")
    monkeypatch.setenv("PATH", "")
    checks = {check.name: check.mark for check in sandbox_checks(Settings(defaults=Defaults(sandbox="docker")))}
    assert checks == {"sandboxes bubblewrap": "note", "sandboxes docker": "missing"}


# Control groups of version 2, by the kernel's documentation: files in a directory.


def machine(root: Path) -> Cgroups:
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (root / name).write_text("")
    return Cgroups.of_machine(root)


def test_controllers_are_handed_down_to_our_own_groups_in_version_2(tmp_path: Path) -> None:
    assert machine(tmp_path).version == 2
    for folder in (tmp_path, tmp_path / "rollstream"):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_every_limit_is_written_in_version_2_and_ooms_are_read(tmp_path: Path) -> None:
    group = machine(tmp_path).group("box")
    group.create(SandboxSpec(cpus=0.5, memory_mib=64, pids=10))
    folder = tmp_path / "rollstream" / "box"
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {"memory.max": str(64 * 2**20), "memory.swap.max": "0", "pids.max": "10", "cpu.max": "50000 100000"}
    assert group.oom_kills() == 0
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.oom_kills() == 2


def test_what_is_not_limited_is_not_written() -> None:
    assert list(limits(SandboxSpec(cpus=None, memory_mib=None, pids=None), 1)) == []


def test_a_machine_without_a_controller_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    with pytest.raises(CgroupsUnusable, match="no controller pids"):
        Cgroups.of_machine(tmp_path)
