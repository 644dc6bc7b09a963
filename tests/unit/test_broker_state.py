"""The state file, the lock and the cluster id."""

import json
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker
from rollstream.broker.embedded import formatted_cluster_id, new_cluster_id
from rollstream.broker.state import BrokerState, locked, read_state, write_state
from rollstream.errors import BrokerUnavailable

STATE = BrokerState(
    via="java", version="4.4.0", port=21_000, controller_port=21_001, cluster_id="abc", pid=1, started_at=1_800_000_000.5
)


def test_state_survives_the_file(tmp_path: Path) -> None:
    write_state(tmp_path / "broker.json", STATE)
    assert read_state(tmp_path / "broker.json") == STATE
    assert [path.name for path in tmp_path.iterdir()] == ["broker.json"]


def test_state_file_names_the_bootstrap_servers_for_other_programs(tmp_path: Path) -> None:
    write_state(tmp_path / "broker.json", STATE)
    assert json.loads((tmp_path / "broker.json").read_text())["bootstrap"] == "127.0.0.1:21000"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"via": "smoke signals"}'])
def test_a_state_file_nobody_understands_is_no_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "broker.json").write_text(content)
    assert read_state(tmp_path / "broker.json") is None


def test_a_held_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock", timeout_s=1),
        pytest.raises(BrokerUnavailable, match="another process has held"),
        locked(tmp_path / "lock", timeout_s=0.1),
    ):
        pytest.fail("the lock was given twice")


def test_a_released_lock_is_given_again(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "lock", timeout_s=0.1):
            pass


def test_a_data_directory_that_cannot_be_made_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerUnavailable, match=r"cannot write to .*file/broker: Not a directory"):
        EmbeddedBroker(tmp_path / "file").start()


def test_asking_about_a_broker_that_never_ran_leaves_no_trace(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "data")
    assert broker.status() is None
    assert broker.stop() is False
    assert not broker.data_dir.exists()


def test_cluster_ids_are_in_kafkas_form() -> None:
    made = {new_cluster_id() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(len(text) == 22 and text[0] != "-" for text in made)


def test_cluster_id_is_read_from_storage_once_it_is_formatted(tmp_path: Path) -> None:
    assert formatted_cluster_id(tmp_path) is None
    (tmp_path / "meta.properties").write_text("#\nnode.id=1\ncluster.id=u1sr0YL6c7c752qNEnJRAw\nversion=1\n")
    assert formatted_cluster_id(tmp_path) == "u1sr0YL6c7c752qNEnJRAw"
