"""Images for the tests, packed out of what is installed on this machine: no registry is asked.

The stand-in for Apache Kafka's image has Kafka's own jars, and turns variables into properties with Kafka's own class; only
the start script around them is ours.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.hostpack import PackagesMissing, Recipe, installed_packages, pack
from rollstream.broker.jars import fetch_jars, kafka_version, pom_path

ROOT = Path(__file__).parents[2]
JAVA_RELEASES = (17, 21, 25)
STAND_IN = "rollstream.stand-in"
"""Label of an image that only pretends; a test run that was cut short may have left one behind."""

START_KAFKA = """#!/usr/bin/env bash
set -eu
: "${KAFKA_PROCESS_ROLES:?}" "${CLUSTER_ID:?}"
java -cp '/opt/kafka/libs/*' kafka.docker.KafkaDockerWrapper setup \
    --default-configs-dir /etc/kafka/docker --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config
exec java -Xmx384m -cp '/opt/kafka/libs/*' kafka.Kafka /opt/kafka/config/server.properties
"""
LOG_CONFIG = """Configuration:
  Appenders:
    Console: {name: STDOUT, target: SYSTEM_OUT, PatternLayout: {pattern: "[%d] %p %m (%c)%n"}}
  Loggers:
    Root: {level: WARN, AppenderRef: {ref: STDOUT}}
"""


def kafka_image() -> str:
    """The image that the embedded broker and compose.yml use."""
    return f"apache/kafka:{kafka_version(pom_path().read_text())}"


def kafka_recipe() -> Recipe:
    """What stands in for that image.

    Raises:
        PackagesMissing: none of Debian's Javas is installed here.
    """
    installed = {package.name for package in installed_packages()}
    release = next((number for number in JAVA_RELEASES if f"openjdk-{number}-jre-headless" in installed), None)
    if release is None:
        raise PackagesMissing("packages are not installed here: apt-get install -y default-jre-headless")
    java = next(Path("/usr/lib/jvm").glob(f"java-{release}-openjdk-*/bin/java"))
    jars = fetch_jars(kafka_version(pom_path().read_text()), lambda line: print(line, file=sys.stderr))
    return Recipe(
        packages=[f"openjdk-{release}-jre-headless"],
        copies={jar: f"/opt/kafka/libs/{jar.name}" for jar in sorted(jars.glob("*.jar"))},
        texts={
            "/etc/kafka/docker/run": START_KAFKA,
            "/etc/kafka/docker/log4j2.yaml": LOG_CONFIG,
            "/etc/kafka/docker/tools-log4j2.yaml": LOG_CONFIG,
        },
        links={"/usr/bin/java": str(java)},
        owned=["/opt/kafka/config", "/var/lib/kafka/data"],
        instructions=[
            f"LABEL {STAND_IN}=true",
            "USER user",
            "VOLUME /var/lib/kafka/data",
            "EXPOSE 9092",
            'CMD ["/etc/kafka/docker/run"]',
        ],
    )


def python_recipe(wheels: Path) -> Recipe:
    """A Python whose pip knows only the packages in `wheels`: the base for deploy/Dockerfile."""
    return Recipe(
        packages=["ca-certificates", "libstdc++6", "python3", "python3-venv"],
        copies={wheels: "/wheels"},
        texts={"/etc/pip.conf": "[global]\nno-index = true\nfind-links = /wheels\ndisable-pip-version-check = true\n"},
    )


def download_wheels(into: Path) -> None:
    """Fetch what deploy/Dockerfile installs, for Debian's Python, with the pip that runs the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    print_version = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run(["/usr/bin/python3", "-c", print_version], capture_output=True, text=True, check=True).stdout
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary",
        ":all:",
        "--python-version",
        version.strip(),
    ]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), "-d", str(into), *wanted], check=True)


def engine_has_official(tag: str) -> bool:
    """Whether the engine has the image, and not a stand-in under its name."""
    command = ["docker", "image", "inspect", "-f", f'{{{{index .Config.Labels "{STAND_IN}"}}}}', tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and not done.stdout.strip()


@contextmanager
def packed(tag: str, recipe: Recipe) -> Iterator[str]:
    """An image for the time of the `with`."""
    pack(tag, recipe)
    try:
        yield tag
    finally:
        remove(tag)


def remove(tag: str) -> None:
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)
