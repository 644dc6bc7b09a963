"""compose.yml agrees with the workers there are, with the settings, and with what the agent side must not see."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.broker.config import FIXED_PROPERTIES
from rollstream.broker.jars import kafka_version, pom_path
from rollstream.health import ANSWER_S
from rollstream.settings import KafkaSettings
from services.__main__ import WORKERS

ROOT = Path(__file__).parents[2]
CLEAN_UP_S = 30

Service = dict[str, Any]


@pytest.fixture(scope="module")
def raw() -> dict[str, Service]:
    """The services as they are written."""
    services: dict[str, Service] = yaml.safe_load((ROOT / "compose.yml").read_text())["services"]
    return services


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    """The services of somebody who sets no variable."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yml").read_text())
    assert "${" not in text, "a variable without a default"
    found: dict[str, Service] = yaml.safe_load(text)["services"]
    return found


@pytest.fixture(params=WORKERS)
def worker(request: pytest.FixtureRequest, services: dict[str, Service]) -> Service:
    service: Service = services[request.param]
    return service


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)s", text)
    assert found, f"expected whole seconds, found {text}"
    return int(found[1])


def targets(service: Service) -> set[str]:
    """Where directories and files of the host appear."""
    volumes = service.get("volumes", [])
    return {volume["target"] if isinstance(volume, dict) else volume.split(":")[1] for volume in volumes}


def test_every_worker_is_a_service_and_nothing_else_is(raw: dict[str, Service]) -> None:
    folders = {path.parent.name for path in (ROOT / "services").glob("*/app.py")}

    assert set(raw) == {*folders, "kafka", "provision"}
    assert folders == set(WORKERS)


@pytest.mark.parametrize("name", WORKERS)
def test_a_service_runs_the_worker_it_is_named_after(name: str, services: dict[str, Service]) -> None:
    assert services[name]["command"] == ["python", "-m", "services", name]


def test_every_image_can_be_replaced(raw: dict[str, Service]) -> None:
    images = {service["image"] for service in raw.values()}

    assert all(re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[^}]+\}", image) for image in images)


def test_the_kafka_is_the_one_of_the_embedded_broker(services: dict[str, Service]) -> None:
    assert services["kafka"]["image"] == f"apache/kafka:{kafka_version(pom_path().read_text())}"


@pytest.mark.parametrize(
    "name",
    [
        "auto.create.topics.enable",
        "log.retention.bytes",
        "log.retention.ms",
        "message.max.bytes",
        "offsets.retention.minutes",
        "offsets.topic.replication.factor",
        "replica.fetch.max.bytes",
    ],
)
def test_the_broker_keeps_everything_and_takes_large_records_as_the_embedded_one_does(
    name: str, services: dict[str, Service]
) -> None:
    variable = "KAFKA_" + name.replace(".", "_").upper()

    assert str(services["kafka"]["environment"][variable]) == str(FIXED_PROPERTIES[name])


def test_the_broker_is_published_on_the_loopback_address_only(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]

    assert published == ["127.0.0.1:9092:9092"]


def test_workers_start_after_a_healthy_broker_and_successful_provisioning(
    worker: Service, services: dict[str, Service]
) -> None:
    conditions = {name: wanted["condition"] for name, wanted in worker["depends_on"].items()}

    assert conditions == {"kafka": "service_healthy", "provision": "service_completed_successfully"}
    assert services["provision"]["depends_on"] == {"kafka": {"condition": "service_healthy"}}
    assert "healthcheck" in services["kafka"]


@pytest.mark.parametrize("worker", WORKERS)
def test_a_container_is_as_healthy_as_its_worker_says(services: dict[str, Any], worker: str) -> None:
    check = services[worker]["healthcheck"]
    assert check["test"] == ["CMD", "python", "-m", "services.health"]
    assert int(check["timeout"].removesuffix("s")) > ANSWER_S


def test_workers_are_given_time_to_drain_and_clean_up(worker: Service) -> None:
    assert seconds(worker["stop_grace_period"]) > KafkaSettings().drain_timeout_s + CLEAN_UP_S


def test_workers_come_back_and_hold_no_privileges(worker: Service) -> None:
    assert worker["restart"] == "unless-stopped"
    assert worker["cap_drop"] == ["ALL"]
    assert "privileged" not in worker
    assert worker["user"] == "1000:1000"


def test_the_agent_side_has_neither_the_sealing_key_nor_the_data_directory(services: dict[str, Service]) -> None:
    agent = services["agent_worker"]

    assert targets(agent) == {"/etc/rollstream/rollstream.toml"}
    assert "ROLLSTREAM_SEALING_KEY" not in agent["environment"]


def test_only_the_agent_side_is_given_the_models_key(services: dict[str, Service]) -> None:
    assert [name for name, service in services.items() if "OPENAI_API_KEY" in service["environment"]] == ["agent_worker"]


def test_no_secret_is_in_the_file(services: dict[str, Service]) -> None:
    secrets = {
        (name, variable): value
        for name, service in services.items()
        for variable, value in service["environment"].items()
        if variable.endswith(("_KEY", "_PASSWORD", "_TOKEN"))
    }

    # Null hands the host's variable through, if there is one.
    assert secrets
    assert set(secrets.values()) == {None}


def copied_sources() -> set[str]:
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    return {source.rstrip("/") for line in copies for source in line.split()}


def test_the_dockerfile_copies_what_is_not_ignored_and_nothing_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}

    assert copied_sources() == allowed
    assert all((ROOT / source).exists() for source in allowed)


def test_the_dockerfile_copies_all_that_the_package_is_built_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel.get("force-include", {}), project["project"]["readme"], "pyproject.toml"}

    assert needed <= copied_sources()
