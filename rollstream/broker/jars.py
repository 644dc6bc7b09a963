"""The jars of Apache Kafka, fetched once by Maven and shared by all data directories.

A directory under its final name is complete: the fetch happens beside it and ends with a rename.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollstream.broker.state import locked
from rollstream.errors import BrokerUnavailable

FETCH_TIMEOUT_S = 600.0


def pom_path() -> Path:
    """The pom that pins what is fetched: next to this module in a wheel, in `deploy/kafka` in a checkout."""
    packaged = Path(__file__).with_name("pom.xml")
    return packaged if packaged.is_file() else Path(__file__).parents[2] / "deploy" / "kafka" / "pom.xml"


def kafka_version(pom: str) -> str:
    """The Kafka version that the text of a pom pins."""
    found = re.search(r"<kafka\.version>([^<]+)</kafka\.version>", pom)
    if found is None:
        raise ValueError("the pom has no <kafka.version>")
    return found[1].strip()


def cache_dir(environ: dict[str, str]) -> Path:
    """Where fetched artefacts are kept: `ROLLSTREAM_CACHE_DIR`, else the user's cache directory."""
    if own := environ.get("ROLLSTREAM_CACHE_DIR"):
        return Path(own)
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "rollstream"
    return Path.home() / ".cache" / "rollstream"


def jars_dir(version: str) -> Path:
    return cache_dir(dict(os.environ)).resolve() / f"kafka-{version}"


def fetch_jars(version: str, notice: Callable[[str], None]) -> Path:
    """The directory with the jars of Kafka `version`, fetched with Maven if it is not there yet.

    Raises:
        BrokerUnavailable: Maven failed, with its first error.
    """
    target = jars_dir(version)
    if target.is_dir():
        return target
    with locked(target.with_name(f"{target.name}.lock"), timeout_s=FETCH_TIMEOUT_S):
        if target.is_dir():
            return target
        notice(f"fetching Apache Kafka {version} with Maven (once, about 45 MB)")
        for abandoned in target.parent.glob(f".{target.name}-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            fetched = Path(temporary) / "jars"
            _run_maven(version, fetched)
            fetched.rename(target)
    return target


def _run_maven(version: str, into: Path) -> None:
    command = [
        "mvn", "-q", "-B", "-f", str(pom_path()), "dependency:copy-dependencies",
        f"-DoutputDirectory={into}", "-DincludeScope=runtime",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise BrokerUnavailable(f"Apache Kafka {version} is not fetched yet and Maven was not found") from None
    except subprocess.TimeoutExpired:
        raise BrokerUnavailable(f"Maven did not fetch Apache Kafka {version} in {FETCH_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not any(into.glob(f"kafka_2.13-{version}.jar")):
        raise BrokerUnavailable(
            f"Maven could not fetch Apache Kafka {version} ({first_error(done.stdout + done.stderr)}); "
            "check the network or Maven's settings, or name your own broker in KAFKA_BOOTSTRAP_SERVERS"
        )


def first_error(output: str) -> str:
    """The first error line of Maven's output, without its colours, labels and pointers to help."""
    plain = re.sub(r"\x1b\[[0-9;]*m| -> \[Help \d+\]", "", output)
    errors = [line.removeprefix("[ERROR]").strip() for line in plain.splitlines() if line.startswith("[ERROR]")]
    return next(filter(None, errors), "no error was printed")[:300]
