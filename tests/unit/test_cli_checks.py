"""What commands check before they act: model endpoints, options, the surroundings."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollstream.broker.runtime import Surroundings
from rollstream.cli.common import pairs
from rollstream.cli.demo import next_name
from rollstream.cli.doctor import (
    disk_check,
    group_check,
    model_check,
    process_check,
    retention_check,
    runtime_check,
    snapshot_check,
    topics_check,
)
from rollstream.cli.endpoints import Endpoint, ask
from rollstream.cli.publish import Options, check_model, request_of
from rollstream.errors import UsageError
from rollstream.eventlog.groups import CONSUMPTIONS, GroupState, remaining
from rollstream.eventlog.provisioning import TopicState
from rollstream.health import LaneHealth, ProcessHealth, WorkerHealth
from rollstream.publishing import run_name, stem_of
from rollstream.settings import Defaults, Limits, ModelSettings, Settings
from topics.catalogue import CATALOGUE

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that gives one answer to everything, and returns its base URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


MODELS = json.dumps({"data": [{"id": "small"}, {"id": "large"}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "state", "models"),
    [
        (200, MODELS, "answers", ("small", "large")),
        (200, b'{"data": []}', "answers", ()),
        (200, b"<html>", "unlisted", ()),
        (200, b"[1]", "unlisted", ()),
        (404, b"", "unlisted", ()),
        (500, b"", "unlisted", ()),
        (401, b"", "unauthorised", ()),
        (403, b"", "unauthorised", ()),
    ],
)
def test_an_endpoint_is_told_apart_by_its_answer(
    serve: Serve, status: int, body: bytes, state: str, models: tuple[str, ...]
) -> None:
    found = ask(ModelSettings(base_url=serve(status, body)))
    assert (found.state, found.models) == (state, models)


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1", "nonsense", "http://[::"])
def test_an_endpoint_that_is_not_there_is_unreachable(base_url: str) -> None:
    assert ask(ModelSettings(base_url=base_url)).state == "unreachable"


def test_a_declared_model_needs_no_endpoint_to_answer() -> None:
    check_model("small", Settings(models={"small": ModelSettings(base_url="http://127.0.0.1:9/v1")}))


@pytest.mark.parametrize(("status", "body"), [(200, MODELS), (404, b""), (401, b"")])
def test_an_undeclared_model_may_be_one_that_the_default_endpoint_serves(serve: Serve, status: int, body: bytes) -> None:
    check_model("small", Settings(models={"default": ModelSettings(base_url=serve(status, body))}))


def test_a_model_that_nobody_serves_is_refused_with_those_there_are(serve: Serve) -> None:
    settings = Settings(models={"mine": ModelSettings(), "default": ModelSettings(base_url=serve(200, MODELS))})
    with pytest.raises(
        UsageError, match=r"no model is named 'smal': .* default, mine, and the default endpoint .* small, large"
    ):
        check_model("smal", settings)


def options(file: Path, **given: Any) -> Options:
    nothing: dict[str, Any] = dict.fromkeys(Options.__dataclass_fields__)
    return Options(**(nothing | {"file": file, "harness": "oracle"} | given))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "GSM8K test.jsonl"
    path.write_text("{}\n")
    return path


def test_options_win_over_settings_and_the_rest_comes_from_there(tasks: Path) -> None:
    settings = Settings(limits=Limits(max_steps=7, agent_timeout_seconds=5), defaults=Defaults(attempts=3))
    given = options(tasks, agent_timeout=9.0, sampling=["temperature=1", "stop=END", "top_p=0.5"], role=["user=default"])
    request = request_of(given, settings)
    assert (request.limits.max_steps, request.limits.agent_timeout_s, request.attempts) == (7, 9.0, 3)
    assert request.composition.sampling.model_dump(exclude_none=True) == {"temperature": 1.0, "stop": ["END"], "top_p": 0.5}
    assert request.composition.models == {"policy": "default", "user": "default"}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "true", '"hot"', "-1"])
def test_a_sampling_value_that_is_no_sensible_number_is_refused(tasks: Path, value: str) -> None:
    with pytest.raises(UsageError, match="temperature"):
        request_of(options(tasks, sampling=[f"temperature={value}"]), Settings())


@pytest.mark.parametrize("run", ["", "  ", "a\nb", "x" * 201])
def test_a_run_needs_a_printable_name(tasks: Path, run: str) -> None:
    with pytest.raises(UsageError, match="a run's name"):
        request_of(options(tasks, run=run), Settings())


def test_a_run_without_a_name_gets_a_readable_one_of_its_own(tasks: Path) -> None:
    at = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    names = {run_name(tasks, at) for _ in range(20)}
    assert all(name.startswith("GSM8K-test-20240506-070809-") for name in names)
    assert len(names) > 1


@pytest.mark.parametrize(
    ("name", "stem"), [("a.jsonl.gz", "a"), ("a b.json", "a-b"), ("...", "tasks"), ("x.y.parquet", "x.y"), ("ü.jsonl", "tasks")]
)
def test_a_file_names_its_dataset(name: str, stem: str) -> None:
    assert stem_of(Path("folder") / name) == stem


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert pairs(["a=b=c", "d="], "--x") == [("a", "b=c"), ("d", "")]
    with pytest.raises(UsageError, match="--x expects NAME=VALUE, found '=b'"):
        pairs(["=b"], "--x")


@pytest.mark.parametrize(
    ("names", "name"), [([], "demo-1"), (["demo-1", "demo-9", "demo-x", "other"], "demo-10"), (["demo-99999999999"], "demo-1")]
)
def test_every_demo_is_a_run_of_its_own(names: list[str], name: str) -> None:
    assert next_name(names) == name


@pytest.mark.parametrize(
    ("committed", "open_records"),
    [(None, 10), ((-1, ""), 10), ((5, ""), 10), ((15, ""), 0), ((12, "somebody else's"), 3)],
)
def test_lag_is_what_is_not_done(committed: tuple[int, str] | None, open_records: int) -> None:
    assert remaining(committed, start=5, end=15) == open_records


def test_a_check_that_failed_says_what_to_do() -> None:
    nobody = group_check(GroupState(CONSUMPTIONS[0], (), 3))
    assert (nobody.mark, nobody.found, nobody.remedy) == (
        "missing",
        "nobody consumes tasks.in, 3 records open",
        "rollstream up",
    )
    assert group_check(GroupState(CONSUMPTIONS[0], ("a 1", "b 2"), 0)).mark == "ok"


def test_a_broker_runtime_is_needed_only_without_a_broker_of_ones_own() -> None:
    nothing = Surroundings()
    assert runtime_check(nothing, needed=True).mark == "missing"
    assert runtime_check(nothing, needed=False).mark == "note"
    assert runtime_check(Surroundings(java="java", java_version=17, jars_cached=True), needed=True).found == "Java 17"


def test_disk_space_is_looked_at_where_the_data_will_be(tmp_path: Path) -> None:
    assert disk_check(tmp_path / "not" / "yet").mark == "ok"


def test_topics_are_missing_wrong_or_as_in_the_catalogue() -> None:
    settings = Settings()
    absent = [TopicState(topic, topic.name, None, {}) for topic in CATALOGUE]
    right = [TopicState(topic, topic.name, topic.partitions(settings.kafka.partitions), {}) for topic in CATALOGUE]
    wrong = [TopicState(CATALOGUE[0], CATALOGUE[0].name, 99, {}), *right[1:]]
    assert topics_check(absent, settings).remedy == "rollstream topics ensure"
    assert topics_check(right, settings).mark == "ok"
    assert "expected 12 partitions, found 99" in topics_check(wrong, settings).found


@pytest.mark.parametrize(
    ("endpoint", "mark", "remedy"),
    [
        (Endpoint("u", "answers", ("m",)), "ok", ""),
        (Endpoint("u", "answers", ("other",)), "note", "set models.small.model to one that it serves"),
        (Endpoint("u", "unlisted", detail="answers 404 to /models"), "ok", ""),
        (Endpoint("u", "unreachable", detail="does not answer"), "missing", "correct models.small.base_url"),
        (Endpoint("u", "unauthorised", detail="refuses the key"), "missing", "export SMALL_KEY=…"),
    ],
)
def test_a_model_endpoint_is_checked_with_its_remedy(endpoint: Endpoint, mark: str, remedy: str) -> None:
    check = model_check("small", ModelSettings(base_url="u", model="m", api_key_env="SMALL_KEY"), endpoint)
    assert (check.mark, check.remedy) == (mark, remedy)


def test_a_store_that_was_never_published_is_a_note(tmp_path: Path) -> None:
    assert snapshot_check(tmp_path / "trajectories.duckdb", 0).mark == "note"
    (tmp_path / "trajectories.duckdb").touch()
    assert snapshot_check(tmp_path / "trajectories.duckdb", 0).mark == "ok"


@pytest.mark.parametrize(
    ("kept_s", "mark"),
    [(-1, "ok"), (90_000, "ok"), (80_000, "missing"), (0, "missing")],
    ids=["for ever", "25 h", "22 h", "not"],
)
def test_a_log_that_forgets_before_an_episode_and_an_outage_are_over_is_found_out(kept_s: int, mark: str) -> None:
    limits = Limits(default_episode_timeout_seconds=3600)
    retention = str(kept_s if kept_s < 0 else kept_s * 1000)
    state = TopicState(CATALOGUE[0], "tasks.in", 12, {"retention.ms": retention})
    check = retention_check([state], Settings(limits=limits))
    assert check.mark == mark
    assert mark == "ok" or "may be needed for 25 h 0 min" in check.found


def test_a_worker_process_that_is_not_well_is_found_out_with_what_is_wrong() -> None:
    lane = LaneHealth("g", 3, in_flight=4, span=9, mark_age_s=100.0, commit_age_s=0.0, out_for_s=0.0)
    well = process_check(ProcessHealth(7, (WorkerHealth("agent_worker", None, (lane,)),)))
    assert (well.mark, well.name) == ("ok", "agent_worker (7)")
    assert well.found == "4 records in flight, the oldest for about 1 min 40 s"
    blocked = process_check(ProcessHealth(7, silence="does not answer"))
    assert (blocked.mark, blocked.found) == ("missing", "process 7 does not answer")
