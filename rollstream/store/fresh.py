"""Questions to the store that is being written: answered by the store_worker itself, over Arrow Flight on this machine.

The published copy is what to ask; this is for who cannot wait for the next one. A question is one SELECT, on a cursor of its
own, in a transaction that cannot write, in a DuckDB that has the public file and may open no other. Who may ask is who can read
the token, which stands in a file that only the store's owner can read.
"""

import hmac
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.flight as flight

from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store.database import DatabaseFile
from rollstream.store.reader import Answer, first_line, unique

log = logging.getLogger(__name__)

TIMEOUT_S = 20.0
"""For one question: a checkpoint waits for it."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
FILE = "fresh.json"
_BATCH_ROWS = 2_048
_HEADER = "authorization"
_TYPES = b"duckdb_types"

# Table functions that only compute. Others may read files or settings, or make a checkpoint behind the writer's back.
_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "json_each", "json_tree", "repeat_row", "duckdb_columns",
                        "duckdb_tables", "duckdb_views", "pragma_table_info"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a store_worker answers, as it stands in the data directory."""

    location: str
    token: str
    pid: int


class FreshServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers until `close`. Create it with `serve`."""

    def __init__(self, file: DatabaseFile, token: str) -> None:
        super().__init__("grpc://127.0.0.1:0", middleware={_HEADER: _Checks(token)})
        self._file = file
        # Never executed on: what it gives is cursors.
        self._root = file.connection.cursor()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
        try:
            table, types = self._answer(ticket.ticket.decode("utf-8", "replace"))
        except UsageError as error:
            raise _refusal(str(error)) from None
        except duckdb.InterruptException:
            raise _refusal(f"SQL: no answer within {TIMEOUT_S:g} s; ask the published copy, without --fresh") from None
        except duckdb.Error as error:
            raise _refusal(f"SQL: {first_line(error)}") from None
        return flight.RecordBatchStream(table.replace_schema_metadata({_TYPES: json.dumps(types).encode()}))

    def _answer(self, query: str) -> tuple[pa.Table, list[str]]:
        with self._file.undisturbed:
            cursor = self._root.cursor()
            alarm = threading.Timer(TIMEOUT_S, cursor.interrupt)
            try:
                alarm.start()
                cursor.execute("USE store; BEGIN TRANSACTION READ ONLY")
                require_one_select(cursor, query)
                relation = cursor.sql(query)
                return _bounded(relation.to_arrow_reader(_BATCH_ROWS)), [str(type_) for type_ in relation.types]
            finally:
                alarm.cancel()
                cursor.close()


def serve(file: DatabaseFile, folder: Path) -> FreshServer:
    """Answer questions to `file`, and say in `folder` where."""
    token = secrets.token_hex(32)
    server = FreshServer(file, token)
    endpoint = Endpoint(f"grpc://127.0.0.1:{server.port}", token, os.getpid())
    written = folder / f".{FILE}.tmp"
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(asdict(endpoint), out)
    os.replace(written, folder / FILE)
    return server


def close(server: FreshServer, folder: Path) -> None:
    """Stop answering; a question that is being answered still is."""
    (folder / FILE).unlink(missing_ok=True)
    server.shutdown()


def require_one_select(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """See that `query` is one SELECT that calls no table function but those that only compute.

    Raises:
        UsageError: it is something else.
    """
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise UsageError(f"expected one SQL statement, found {len(statements)}")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise UsageError(f"expected a SELECT, found a statement of type {statements[0].type.name}: the store is only read")
    parsed = json.loads(connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0])
    if parsed.get("error"):
        raise UsageError(f"expected a SELECT that can be answered fresh: {parsed.get('error_message')}")
    for name in _table_functions(parsed):
        if name not in _FUNCTIONS:
            raise UsageError(f"expected a SELECT from the store, found the table function {name}")


def _table_functions(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if node.get("type") == "TABLE_FUNCTION":
            yield str(node["function"]["function_name"]).lower()
        for child in node.values():
            yield from _table_functions(child)
    elif isinstance(node, list):
        for child in node:
            yield from _table_functions(child)


def _bounded(reader: pa.RecordBatchReader) -> pa.Table:
    batches, size = [], 0
    for batch in reader:
        size += batch.nbytes
        if size > MAX_ANSWER_BYTES:
            raise UsageError(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB: ask the published copy, without --fresh")
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


class _Checks(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}"

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        if not any(hmac.compare_digest(value, self._expected) for value in headers.get(_HEADER, [])):
            raise flight.FlightUnauthenticatedError("expected the token of the store's data directory")


def _refusal(sentence: str) -> flight.FlightServerError:
    return flight.FlightServerError(sentence, sentence.encode())


def ask_fresh(data_dir: Path, query: str) -> Answer:
    """The answer of the store_worker of `data_dir` to one SELECT.

    Raises:
        StoreUnavailable: none answers.
        UsageError: it is not one SELECT, or DuckDB refuses it.
    """
    endpoint = read_endpoint(data_dir)
    options = flight.FlightCallOptions(headers=[(_HEADER.encode(), f"Bearer {endpoint.token}".encode())], timeout=3 * TIMEOUT_S)
    try:
        with flight.connect(endpoint.location) as client:
            table = client.do_get(flight.Ticket(query.encode("utf-8", "replace")), options).read_all()
    except (flight.FlightUnavailableError, flight.FlightUnauthenticatedError, flight.FlightTimedOutError) as error:
        reason = re.split(r"\. ?gRPC client debug", str(error))[0]
        raise StoreUnavailable(f"the store_worker of {data_dir} does not answer ({reason}); ask without --fresh") from None
    except flight.FlightError as error:
        sentence = error.extra_info.decode() if error.extra_info else str(error).splitlines()[0]
        raise UsageError(sentence) from None
    rows = (row for batch in table.to_batches() for row in zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return Answer(unique(table.column_names), json.loads(table.schema.metadata[_TYPES]), rows)


def read_endpoint(data_dir: Path) -> Endpoint:
    """Where the store_worker of `data_dir` answers.

    Raises:
        StoreUnavailable: none does, or its file is another user's.
    """
    path = data_dir / "store" / FILE
    try:
        return Endpoint(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise StoreUnavailable(f"no store_worker of {data_dir} runs; ask without --fresh") from None
    except PermissionError:
        raise StoreUnavailable(f"{path} is readable by the store's owner only; ask without --fresh") from None
