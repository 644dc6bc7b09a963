"""Which sandbox backend a run gets, and what is refused where it is published."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollstream.admission import Admission
from rollstream.backends import default_backend
from rollstream.cli.own import given_by_path
from rollstream.environments import registry
from rollstream.errors import Refused, UsageError
from rollstream.placements import agent_box, with_backend
from rollstream.publishing import Accepted, RunRequest, plan_run, tasks_of
from rollstream.settings import Defaults, PoolSettings, SandboxSettings, Settings
from schemas.sandbox import SandboxSpec
from schemas.values import Composition, EpisodeLimits
from tests.boxed import BoxedEnvironment
from tests.environments import load_anew

NOOP = Composition(harness="noop")
DOCKER = Settings(sandboxes=SandboxSettings(provider="docker"))
AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def boxed() -> Iterator[None]:
    registry.ENVIRONMENTS["boxed"] = BoxedEnvironment
    load_anew()
    yield
    registry.ENVIRONMENTS.pop("boxed", None)
    load_anew()


def test_the_nearest_setting_names_the_backend() -> None:
    assert default_backend(DOCKER) == "docker"
    assert default_backend(Settings(defaults=Defaults(sandbox="mine"), sandboxes=SandboxSettings(provider="docker"))) == "mine"


def test_only_what_takes_a_box_is_given_a_backend_and_one_that_is_named_stays() -> None:
    assert with_backend(NOOP, "none", "docker").sandbox is None
    assert with_backend(NOOP, "agent_in_env", "docker").sandbox == "docker"
    assert with_backend(NOOP.model_copy(update={"sandbox": "mine"}), "agent_in_env", "docker").sandbox == "mine"


def test_a_harness_brings_the_box_of_the_settings_where_the_environment_has_none_for_it() -> None:
    described, own = SandboxSpec(pids=9), SandboxSpec(pids=10)
    assert agent_box("agent_in_env", described, own) == described
    assert agent_box("agent_sandboxed", None, own) == own
    assert agent_box("separate", described, own) == own
    assert agent_box("none", None, own) is None


def checked(settings: Settings, environment: str, row: dict[str, object], **composition: str) -> str | None:
    admission = Admission.of(settings)
    wanted = NOOP.model_copy(update=composition)
    admission.check_names(environment, wanted)
    return admission.check(environment, wanted, row).composition.sandbox


def test_a_row_says_which_backend_it_takes_once_it_is_admitted() -> None:
    assert checked(DOCKER, "boxed", {"word": "w"}) == "docker"
    assert checked(DOCKER, "math", {"question": "1 + 1 = ?", "answer": "2"}) is None
    assert checked(DOCKER, "math", {"question": "1 + 1 = ?", "answer": "2"}, sandbox="bubblewrap") == "bubblewrap"


def test_an_unknown_backend_is_refused_with_the_names_there_are_unless_a_pool_has_it() -> None:
    with pytest.raises(UsageError, match=r"expected one of the sandbox providers bubblewrap, docker, local, found 'dokcer'"):
        checked(Settings(), "boxed", {"word": "w"}, sandbox="dokcer")
    admission = Admission.of(Settings(pools={"far": PoolSettings(sandboxes=["firecracker"])}))
    wanted = NOOP.model_copy(update={"sandbox": "firecracker"})
    admission.check_names("boxed", wanted)
    assert admission.check("boxed", wanted, {"word": "w"}).composition == wanted
    assert admission.notes() == (
        "sandbox firecracker is not installed here: its tasks are published unchecked, and wait for pool far",
    )


def test_what_a_backend_can_hold_nowhere_is_refused_before_anything_is_started() -> None:
    with pytest.raises(Refused, match="bubblewrap runs the programs of its machine and no image, found some/image"):
        checked(Settings(), "boxed", {"word": "w", "image": "some/image"}, sandbox="bubblewrap")
    with pytest.raises(Refused, match="docker knows the networks gateway, none, public, found allowlist"):
        checked(DOCKER, "boxed", {"word": "w", "box": {"network": "allowlist"}})


def test_local_takes_permission_and_no_limits() -> None:
    with pytest.raises(UsageError, match=r"--unsafe-local of `run` and `up`, or the setting sandboxes\.unsafe_local"):
        checked(Settings(), "boxed", {"word": "w"}, sandbox="local")
    own, _, _ = given_by_path(Settings(), [], [], unsafe_local=True)
    assert own.variables() == {"ROLLSTREAM_SANDBOXES__UNSAFE_LOCAL": "true"}
    assert "[sandboxes] unsafe_local = true" in own.caveat()
    with pytest.raises(Refused, match="local cannot enforce cpus here"):
        checked(own.settings, "boxed", {"word": "w"}, sandbox="local")
    unlimited = {"cpus": None, "memory_mib": None, "pids": None, "disk_mib": None, "network": "public"}
    assert checked(own.settings, "boxed", {"word": "w", "box": unlimited}, sandbox="local") == "local"


def test_manifest_and_header_name_the_backend_of_a_run_that_takes_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"environment": "math", "question": "1 + 1 = ?", "answer": "2"},
        {"environment": "boxed", "word": "w"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = RunRequest(path, "r", NOOP, EpisodeLimits(), 1)
    plan = plan_run(request, DOCKER, AT)
    tasks = [row.task for row in tasks_of(request, DOCKER, AT) if isinstance(row, Accepted)]
    assert plan.refusals == ()
    assert plan.manifest.composition.sandbox == "docker"
    assert [dict(task.headers()).get("sandbox") for task in tasks] == [None, b"docker"]
    path.write_text(json.dumps(rows[0]) + "\n")
    assert plan_run(replace(request, run="s"), DOCKER, AT).manifest.composition.sandbox is None
