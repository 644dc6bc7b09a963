"""What every environment must do, as tests to inherit.

    class TestMine(EnvironmentConformance):
        def environment(self):
            return MyEnvironment()

        def rows(self):
            return [{"question": "1 + 1?", "answer": "2"}]

Rows stand as they do after the intake: flat, with `messages` and `tools` in chat form. The suite asks for non-interference:
what the agent sees is a function of the public fields alone. That finds a leaked letter, which no search for a value can.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import TypeAdapter

from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import Environment, Episode, Seeded, Services, Task, Verdict
from rollstream.environments.registry import admit, public_view
from rollstream.errors import Refused
from schemas.session import Submission
from schemas.values import ChatMessage

CANARY = "canary-5f1c7e0a9d"
HOSTILE: dict[str, str] = {
    "five megabytes": "7 " * 2_500_000,
    "five megabytes without a space": "x" * 5_000_000,
    "a NUL": "a\x00b\x00",
    "a lone surrogate": "\ud800 is \\boxed{\udfff}",
    "no ASCII": "答案是 ٤٢ — ½ 🙂\u202e",
    "boxes that never close": "\\boxed{" * 20_000,
    "deep nesting": "\\boxed{" + "{" * 10_000 + "1" + "}" * 10_000 + "}",
    "many statements": "answer is " * 20_000,
    "white space": "answer" + " " * 20_000 + "\n" * 20_000,
    "a tower of powers": "\\boxed{9^{9^{9^{9^9}}}}",
    "many digits": "\\boxed{" + "9" * 10_000 + "}",
}


class EnvironmentConformance:
    """Inherit, under a name that begins with `Test`, and say which environment and which rows."""

    grader_timeout_s = 3.0
    hostile_time_s = 30.0
    """Longest that scoring one hostile submission may take, deadline of the grader included."""

    def environment(self) -> Environment[Any]:
        raise NotImplementedError("return the environment under test")

    def rows(self) -> Sequence[Mapping[str, object]]:
        """At least one; with two or more, fields are swapped between them to find leaks."""
        raise NotImplementedError("return rows that the environment admits")

    def test_name_version_and_threshold_are_well_formed(self) -> None:
        environment = self.environment()
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,63}", environment.name), f"name {environment.name!r} is no snake_case name"
        assert 1 <= len(environment.version) <= 512, "version is empty, or longer than 512 characters"
        assert math.isfinite(environment.success_threshold), "success_threshold is not finite"
        assert issubclass(environment.task_type, Task), "task_type must inherit rollstream.environments.protocol.Task"
        assert isinstance(environment.public_fields, frozenset), "public_fields must be a frozenset"

    def test_rows_are_admitted(self) -> None:
        assert self.rows(), "give at least one row"
        for row in self.rows():
            admit(self.environment(), row)

    def test_a_task_survives_its_ticket(self) -> None:
        for row, task in self._tasks():
            of_row = admit(self.environment(), json.loads(json.dumps(row)))
            of_task = self.environment().task_type.model_validate_json(task.model_dump_json())
            assert of_row == task, f"the task of {row} changes when its row travels as JSON"
            assert of_task == task, f"the task of {row} changes when it travels as JSON"

    def test_seeding_is_deterministic_and_changes_nothing(self) -> None:
        for row, task in self._tasks():
            before = deepcopy(task)
            first = _shown(self.environment().seed(task))
            assert task == before, f"seeding changed the task of {row}"
            assert first == _shown(self.environment().seed(admit(self.environment(), row))), f"two seeds of {row} differ"

    def test_the_first_observation_waits_for_the_agent(self) -> None:
        for row, task in self._tasks():
            messages = TypeAdapter(list[ChatMessage]).validate_python(self.environment().seed(task).messages)
            assert messages, f"{row} has no first observation"
            assert messages[-1].get("role") != "assistant", f"the first observation of {row} ends with the agent's own turn"

    def test_the_reference_scores_full_reward(self) -> None:
        references = [(task, self.environment().reference(task)) for _, task in self._tasks()]
        scored = [(task, reference) for task, reference in references if reference is not None]
        for (task, reference), verdict in zip(scored, self._verdicts(scored), strict=True):
            assert self._succeeds(verdict), f"the reference {reference} of {task} scored {verdict}"

    def test_an_empty_submission_is_scored_and_fails(self) -> None:
        empty = [(task, Submission(text=text)) for _, task in self._tasks() for text in ("", " \n")]
        for (task, _), verdict in zip(empty, self._verdicts(empty), strict=True):
            assert not self._succeeds(verdict), f"an empty submission to {task} scored {verdict}"

    def test_hostile_submissions_are_scored_in_bounded_time(self) -> None:
        _, task = next(self._tasks())
        for what, text in HOSTILE.items():
            started = time.monotonic()
            self._verdicts([(task, Submission(text=text))])
            took_s = time.monotonic() - started
            assert took_s < self.hostile_time_s, f"scoring {what} took {took_s:.1f} s"

    def test_scoring_twice_gives_the_same(self) -> None:
        guess = Submission(text="perhaps 7, or B")
        once = [(task, text) for _, task in self._tasks() for text in (self.environment().reference(task) or guess, guess)]
        verdicts = self._verdicts([*once, *once])
        for (task, submission), first, second in zip(once, verdicts[: len(once)], verdicts[len(once) :], strict=True):
            assert first.reward == second.reward, f"{submission} to {task} scored {first}, then {second}"

    def test_unknown_fields_never_reach_the_agent(self) -> None:
        for row, task in self._tasks():
            strange = {"zz_unknown": CANARY, "verifier_metadata": {"hint": CANARY, "messages": [CANARY]}, "reward": CANARY}
            seeded = self.environment().seed(admit(self.environment(), {**strange, **row}))
            assert _shown(seeded) == _shown(self.environment().seed(task)), f"unknown fields change what {row} shows"

    def test_what_the_agent_sees_depends_on_public_fields_only(self) -> None:
        for row, task in self._tasks():
            shown = _shown(self.environment().seed(task))
            for field, other in self._regraded(row):
                changed = {**row, field: other}
                try:
                    seeded = self.environment().seed(admit(self.environment(), changed))
                except Refused:
                    continue
                assert _shown(seeded) == shown, f"the agent sees another task when only the private {field} is {other!r:.100}"

    def test_grading_text_never_reaches_the_agent(self) -> None:
        for row, task in self._tasks():
            shown = _shown(self.environment().seed(task))
            public = json.dumps(public_view(self.environment(), row))
            for field in self._private(row):
                for text in _texts(row[field]):
                    escaped = json.dumps(text)[1:-1]
                    leaks = len(text) >= 12 and escaped not in public and escaped in shown
                    assert not leaks, f"the agent sees {text!r:.100}, which is the private {field}"

    def _tasks(self) -> Iterator[tuple[Mapping[str, object], Task]]:
        for row in self.rows():
            yield row, admit(self.environment(), row)

    def _private(self, row: Mapping[str, object]) -> list[str]:
        return [field for field in row if field not in public_view(self.environment(), row)]

    def _regraded(self, row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
        """Private fields of a row, each with other values that it might have had."""
        for field in self._private(row):
            own = row[field]
            others = [other[field] for other in self.rows() if field in other]
            made_up: list[object] = [CANARY] if isinstance(own, str) else []
            if isinstance(own, str) and len(own) == 1:
                made_up += list("ABCDE12345")
            if isinstance(own, int):
                made_up.append(own + 1)
            yield from ((field, other) for other in [*others, *made_up] if other != own)

    def _succeeds(self, verdict: Verdict) -> bool:
        assert verdict.reward is not None
        by_reward = verdict.reward >= self.environment().success_threshold
        return by_reward if verdict.success is None else verdict.success

    def _verdicts(self, submissions: Sequence[tuple[Task, Submission]]) -> list[Verdict]:
        """Score in an event loop and a pool of graders of their own, and check what holds of every verdict."""
        verdicts = asyncio.run(self._verify(submissions))
        for verdict in verdicts:
            numbers = [verdict.reward, *verdict.components.values()]
            assert all(isinstance(number, float) and math.isfinite(number) for number in numbers), f"not finite: {verdict}"
            text = json.dumps(dict(verdict.diagnostics), allow_nan=False, ensure_ascii=False)
            assert not re.search("[\ud800-\udfff]", text), f"a lone surrogate, which cannot stand in the log: {verdict}"
        return verdicts

    async def _verify(self, submissions: Sequence[tuple[Task, Submission]]) -> list[Verdict]:
        environment = self.environment()
        verdicts: list[Verdict] = []
        async with GraderPool(1, self.grader_timeout_s) as graders:
            for task, submission in submissions:
                messages = [*environment.seed(task).messages, ChatMessage(role="assistant", content=submission.text)]
                episode = Episode(messages=messages, submission=submission, stop_reason="completed")
                verdicts.append(await environment.verify(task, episode, Services(graders=graders)))
        return verdicts


def _shown(seeded: Seeded) -> str:
    """Everything of a seed that reaches the agent, as JSON."""
    shown = {
        "messages": seeded.messages,
        "tools": seeded.tools,
        "interaction": seeded.interaction,
        "placement": seeded.placement,
    }
    return json.dumps(shown, sort_keys=True)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
