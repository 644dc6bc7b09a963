"""What enters each format, what does not, and what a row looks like."""

import base64
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from rollstream.errors import NothingToExport
from schemas.episode import Sequence
from schemas.rollout import RolloutScored
from schemas.values import ChatMessage
from tests.atif import Trajectory
from tests.events import TOOLS, Attempt, attempts, task_submitted, with_tools
from tests.exporting import export, mixed, rows
from tests.stores import publish_events


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_events(tmp_path_factory.mktemp("store"), *mixed())


# What enters.


def test_sft_takes_successes_and_neither_failures_nor_what_is_masked(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", format="sft")
    assert [(row["task_id"], row["reward"], row["tools"]) for row in rows(tmp_path / "out")] == [
        ("a", 1.0, None),
        ("b", 1.0, None),
    ]
    assert rows(tmp_path / "out")[0]["messages"] == [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "answer 0"},
    ]


def test_a_least_reward_replaces_success_and_an_error_is_no_zero(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "half", format="sft", min_reward=0.5)
    assert [row["reward"] for row in rows(tmp_path / "half")] == [1.0, 0.5, 1.0]
    export(store, tmp_path / "all", format="sft", min_reward=0.0)
    assert sorted(str(row["reward"]) for row in rows(tmp_path / "all")) == ["0.0", "0.0", "0.5", "1.0", "1.0"]


def test_dpo_is_the_best_against_the_worst_of_a_group(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", format="dpo")
    (row,) = rows(tmp_path / "out")
    assert row["prompt"] == [{"role": "user", "content": "1 + 1 = ?"}]
    assert (row["chosen"], row["rejected"]) == (
        [{"role": "assistant", "content": "answer 0"}],
        [{"role": "assistant", "content": "answer 1"}],
    )
    assert (row["chosen_reward"], row["rejected_reward"], row["task_id"]) == (1.0, 0.0, "a")


def test_grpo_has_whole_groups_with_their_failures(store: Path, tmp_path: Path) -> None:
    exported = export(store, tmp_path / "out", format="grpo")
    found = [
        tuple(row[name] for name in ("task_id", "index", "reward", "mask_loss", "status")) for row in rows(tmp_path / "out")
    ]
    assert found == [
        ("a", 0, 1.0, False, "completed"),
        ("a", 1, 0.0, False, "completed"),
        ("a", 2, 0.5, False, "completed"),
        ("a", 3, None, True, "errored"),
        ("b", 0, 1.0, False, "completed"),
        ("b", 1, 1.0, True, "completed"),
    ]
    assert exported.groups == 2


def test_grpo_takes_a_group_when_all_of_it_matches(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", format="grpo", where="reward IS NOT NULL")
    assert {row["task_id"] for row in rows(tmp_path / "out")} == {"b"}


def test_a_condition_is_over_rollouts(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", format="sft", where="task_id = 'b' -- only this")
    assert [row["task_id"] for row in rows(tmp_path / "out")] == ["b"]


def test_only_the_record_that_counts_is_exported(tmp_path: Path) -> None:
    attempt = Attempt()
    publish_events(tmp_path, attempt.task, attempt.scored(), replace(attempt, reward=0.0).scored(revision=1))
    with pytest.raises(NothingToExport, match="no attempt succeeded: 1 scored, best 0"):
        export(tmp_path, tmp_path / "out", format="sft")


def test_duplicates_are_left_out_when_asked(tmp_path: Path) -> None:
    task, other = task_submitted("a", attempts=2), task_submitted("b")
    publish_events(tmp_path, *(each.scored() for each in (*attempts(task, 1.0, 1.0), Attempt(other))))
    assert export(tmp_path, tmp_path / "all", format="sft").total == 3
    exported = export(tmp_path, tmp_path / "once", format="sft", dedupe=True)
    assert (exported.total, exported.left_out) == (1, {"duplicate": 2})


def test_a_pair_of_equal_answers_is_no_pair(tmp_path: Path) -> None:
    publish_events(tmp_path, *(each.scored() for each in attempts(task_submitted(attempts=2), 1.0, 0.0)))
    with pytest.raises(NothingToExport, match="none of 2 chosen attempts gave a row: 1 same answer"):
        export(tmp_path, tmp_path / "out", format="dpo")


@pytest.mark.parametrize(("margin", "pairs"), [(0.0, 2), (0.5, 2), (0.6, 1)])
def test_a_margin_is_the_least_difference(tmp_path: Path, margin: float, pairs: int) -> None:
    clear = (replace(each, answer=str(each.index)) for each in attempts(task_submitted("a", attempts=2), 0.0, 1.0))
    close = (replace(each, answer=str(each.index)) for each in attempts(task_submitted("b", attempts=2), 0.5, 1.0))
    publish_events(tmp_path, *(each.scored() for each in (*clear, *close)))
    assert export(tmp_path, tmp_path / "out", format="dpo", margin=margin).total == pairs


def test_what_is_not_text_is_left_out_and_counted(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    messages: list[ChatMessage] = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]},
        {"role": "assistant", "content": "A cat."},
    ]
    task = task_submitted(attempts=2)
    seen = Attempt(task).scored().model_copy(update={"messages": messages})
    publish_events(tmp_path, seen, Attempt(task, index=1).scored())
    exported = export(tmp_path, tmp_path / "sft", format="sft")
    assert (exported.total, exported.left_out) == (1, {"not text": 1})
    export(tmp_path, tmp_path / "atif", format="atif", file_format="jsonl")
    first = Trajectory.model_validate(rows(tmp_path / "atif")[0])
    assert first.steps[0].message[1].source.path == "https://example.org/cat.png"  # type: ignore[union-attr]


def test_parts_that_are_all_text_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": " = ?"}]
    publish_events(
        tmp_path, Attempt().scored().model_copy(update={"messages": [{"role": "user", "content": parts}, Attempt().message()]})
    )
    export(tmp_path, tmp_path / "out", format="sft")
    assert rows(tmp_path / "out")[0]["messages"][0]["content"] == "1 + 1 = ?"  # type: ignore[index]


# Tools.


def test_with_tools_every_message_has_the_same_keys_and_arguments_are_texts(tmp_path: Path) -> None:
    publish_events(tmp_path, with_tools(Attempt().scored()), Attempt(task_submitted("plain")).scored())
    for file_format in ("parquet", "jsonl"):
        export(tmp_path, tmp_path / file_format, format="sft", file_format=file_format)
        played, plain = rows(tmp_path / file_format)
        messages = [*played["messages"], *plain["messages"]]  # type: ignore[misc]
        assert {tuple(message) for message in messages} == {("role", "content", "tool_calls", "tool_call_id")}
        assert messages[2]["content"] == ""
        assert messages[2]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q": "1"}'}
        assert messages[3]["tool_call_id"] == "call-1"
        assert json.loads(str(played["tools"])) == TOOLS
        assert plain["tools"] is None


def test_a_pair_begins_at_the_answer_before_the_worlds_went_apart(tmp_path: Path) -> None:
    task = task_submitted(attempts=2)
    better, worse = with_tools(Attempt(task).scored()), with_tools(Attempt(task, index=1, reward=0.0).scored())
    messages = list(worse.messages)
    # The same call, another result: nothing was answered differently yet, but what follows was.
    messages[3:4] = [{"role": "tool", "tool_call_id": "call-1", "content": "another"}]
    messages[7] = {"role": "assistant", "content": "It is 3."}
    publish_events(tmp_path, better, worse.model_copy(update={"messages": messages}))
    export(tmp_path, tmp_path / "out", format="dpo")
    (row,) = rows(tmp_path / "out")
    assert [len(row[name]) for name in ("prompt", "chosen", "rejected")] == [2, 6, 6]  # type: ignore[arg-type]
    assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"  # type: ignore[index]


# Tokens.


def packed(type_code: str, values: list[int] | list[float]) -> str:
    return base64.b64encode(zstandard.compress(array(type_code, values).tobytes())).decode()


def with_tokens(record: RolloutScored, *, logprobs: bool = True) -> RolloutScored:
    """The same attempt with two sequences, of which its one call sampled two and one tokens."""
    first = Sequence(
        token_ids=packed("i", [1, 2, 3, 4]), spans=[(1, 3, 0)], logprobs=packed("f", [0, -0.5, -0.25, 0]) if logprobs else None
    )
    call = record.calls[0].model_copy(update={"policy_version": "v7"})
    return record.model_copy(
        update={"sequences": [first, Sequence(token_ids=packed("i", [9]), spans=[(0, 1, 0)])], "calls": [call]}
    )


def test_grpo_has_a_row_a_sequence_with_its_tokens(tmp_path: Path) -> None:
    publish_events(tmp_path, with_tokens(Attempt().scored()))
    export(tmp_path, tmp_path / "out", format="grpo")
    names = ("sequence", "input_ids", "loss_mask", "logprobs", "versions")
    assert [tuple(row[name] for name in names) for row in rows(tmp_path / "out")] == [
        (0, [1, 2, 3, 4], [0, 1, 1, 0], [0.0, -0.5, -0.25, 0.0], [None, "v7", "v7", None]),
        (1, [9], [1], None, ["v7"]),
    ]
    assert [row["messages"] is not None for row in rows(tmp_path / "out")] == [True, False]


@pytest.mark.parametrize(
    "sequence",
    [
        Sequence(token_ids="no base64!", spans=[]),
        Sequence(token_ids=base64.b64encode(b"no zstd").decode(), spans=[]),
        Sequence(token_ids=packed("i", [1, 2]), spans=[(0, 3, 0)]),
        Sequence(token_ids=packed("i", [1, 2]), spans=[(0, 1, 7)]),
        Sequence(token_ids=packed("i", [1, 2]), spans=[], logprobs=packed("f", [0.0])),
    ],
)
def test_a_group_whose_tokens_contradict_themselves_is_left_out(tmp_path: Path, sequence: Sequence) -> None:
    broken = Attempt(task_submitted("broken")).scored().model_copy(update={"sequences": [sequence]})
    publish_events(tmp_path, broken, Attempt().scored())
    exported = export(tmp_path, tmp_path / "out", format="grpo")
    assert (exported.groups, exported.left_out) == (1, {"group with unreadable tokens": 1})


# ATIF.


def test_atif_documents_are_of_the_specification(tmp_path: Path) -> None:
    task = task_submitted(attempts=3)
    played, lost = with_tools(Attempt(task).scored()), Attempt(task, index=2).failed()
    publish_events(tmp_path, played, with_tokens(Attempt(task, index=1).scored()), lost)
    exported = export(tmp_path, tmp_path / "out", format="atif", file_format="jsonl")
    assert exported.left_out == {"without messages": 1}
    tools, tokens = (Trajectory.model_validate(row) for row in rows(tmp_path / "out"))
    assert [step.source for step in tools.steps] == ["system", "user", "agent", "agent", "agent"]
    assert tools.steps[2].tool_calls is not None
    assert [call.arguments for call in tools.steps[2].tool_calls] == [{"q": "1"}, {"a": 1}]
    assert tools.steps[2].observation is not None
    assert [(each.source_call_id, each.content) for each in tools.steps[2].observation.results] == [
        ("call-1", "one"),
        ("call-2", "two"),
    ]
    assert tokens.steps[1].metrics is not None
    assert tokens.steps[1].metrics.completion_token_ids == [2, 3, 9]
    assert tokens.steps[1].metrics.prompt_tokens == 10
    assert (tokens.extra["reward"], tokens.extra["status"]) == (1.0, "completed")


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", '"text"', ""])
def test_atif_arguments_are_objects_whatever_a_model_wrote(tmp_path: Path, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "bash", "arguments": arguments}}
    messages: list[ChatMessage] = [
        {"role": "tool", "content": "out of the blue"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "unheard of", "content": "x"},
    ]
    publish_events(tmp_path, Attempt().scored().model_copy(update={"messages": messages}))
    export(tmp_path, tmp_path / "out", format="atif", file_format="jsonl")
    step = Trajectory.model_validate(rows(tmp_path / "out")[0]).steps[1]
    assert step.tool_calls is not None
    assert step.tool_calls[0].arguments == ({"raw_arguments": arguments} if arguments else {})
