"""What questions cost, against what the same table costs at least. CPU time of one process, the best of several tries."""

import time
from hashlib import md5
from pathlib import Path
from uuid import UUID

import duckdb
import pytest

from rollstream.store.snapshot import PUBLISHED
from tests.stores import writing

ROLLOUTS = 50_000
SIZE = 4
STEPS = 200_000
STEPS_EACH = 4
AT_ONCE = 500
"""How many attempts go on at once, so how far apart the steps of one stand."""

_ID = "md5('{kind}' || ({number}))::UUID::VARCHAR"
"""Ids are spread as ours are, so that no look-up can skip a part of the file."""
_ROLLOUTS = f"""
INSERT INTO {{table}} BY NAME
SELECT
    uuid() AS event_id, 'run-1' AS run_id, 'math' AS environment, {_ID.format(kind="group", number=f"n // {SIZE}")} AS group_id,
    {SIZE} AS group_size, n % {SIZE} AS group_index, {_ID.format(kind="rollout", number="n")} AS rollout_id,
    {_ID.format(kind="session", number="n")} AS session_id, 0 AS round, 0 AS try,
    n // {SIZE} % 8 AS kafka_partition, n // 8 AS kafka_offset,
    json_object('messages', [repeat(md5(n::VARCHAR), 10)]) AS payload
    {{more}}
FROM range({ROLLOUTS}) AS each(n)
"""
_SCORES = ", 0 AS revision, 'completed' AS status, (hash(n) % 3 = 0)::DOUBLE AS reward, hash(n) % 3 = 0 AS success"
_TASKS = f"""
INSERT INTO task_submitted BY NAME
SELECT
    uuid() AS event_id, 'run-1' AS run_id, 'math' AS environment, {_ID.format(kind="group", number="n")} AS group_id,
    {SIZE} AS attempts, 0 AS kafka_partition, n AS kafka_offset
FROM range({ROLLOUTS // SIZE}) AS each(n)
"""
_STEPS = f"""
INSERT INTO agent_stepped BY NAME
SELECT
    md5(n::VARCHAR)::UUID AS event_id, {_ID.format(kind="rollout", number="rollout")} AS rollout_id,
    {_ID.format(kind="session", number="rollout")} AS session_id, 0 AS round, 0 AS try,
    n // {AT_ONCE} % {STEPS_EACH} AS step_index,
    json_object('message', json_object('content', repeat(md5(n::VARCHAR), 30))) AS payload
FROM (
    SELECT n, n // {AT_ONCE * STEPS_EACH} * {AT_ONCE} + n % {AT_ONCE} AS rollout FROM range({{first}}, {{last}}) AS each(n)
)
"""
_EPISODES = ", '[\"' || md5(n::VARCHAR)::UUID || '\"]' AS steps"


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    data_dir: Path = tmp_path_factory.mktemp("store")
    with writing(data_dir) as store:
        database = store._database.public
        with database.more_memory():
            for table, more in (("session_ready", ""), ("rollout_scored", _SCORES), ("episode_completed", _EPISODES)):
                database.connection.execute(_ROLLOUTS.format(table=table, more=more))
            database.connection.execute(_TASKS)
            for first in range(0, STEPS, 50_000):
                database.connection.execute(_STEPS.format(first=first, last=first + 50_000))
        store.publish()
    # One thread, because what two threads cost depends on what else the machine does.
    return duckdb.connect(str(data_dir / PUBLISHED), read_only=True, config={"threads": 1})


TURNS = 15


def cpu_s(connection: duckdb.DuckDBPyConnection, *queries: str) -> list[float]:
    """The least of each, asked in turns: what else the machine does meets all of them."""
    least = [float("inf")] * len(queries)
    for _ in range(TURNS):
        for number, query in enumerate(queries):
            start = time.process_time()
            connection.execute(query).fetchall()
            least[number] = min(least[number], time.process_time() - start)
    return least


@pytest.mark.slow
def test_pass_at_k_costs_less_than_five_passes_over_its_table(connection: duckdb.DuckDBPyConnection) -> None:
    passing = "SELECT group_id, count(*), count(*) FILTER (success) FROM rollout_scored GROUP BY group_id"
    plain, estimate = cpu_s(connection, passing, "FROM pass_at_k")
    assert estimate < 5 * plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM steps WHERE rollout_id = '{id}'",
        "FROM steps_of(['{id}'])",
        "SELECT * FROM trajectories WHERE rollout_id = '{id}'",
    ],
)
def test_one_of_fifty_thousand_trajectories_does_not_cost_a_look_at_all(
    connection: duckdb.DuckDBPyConnection, query: str
) -> None:
    one = query.format(id=UUID(md5(b"rollout30123").hexdigest()))
    found = connection.execute(one).fetchall()
    assert len(found) == (1 if "trajectories" in query else STEPS_EACH)
    # Finding it takes a look at every id; what was said in all the others is not read.
    everything, found_s = cpu_s(connection, "SELECT count(message), count(*) FILTER (counts) FROM steps", one)
    assert found_s < everything / 3
