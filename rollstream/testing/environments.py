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
from rollstream.environments.observing import seen_of
from rollstream.environments.protocol import (
    AggregatesMetrics,
    Environment,
    Episode,
    Graders,
    OpenServices,
    ScoredVerdict,
    Seeded,
    Services,
    SteppedEnvironment,
    StepServices,
    Task,
    Verdict,
    World,
    is_stepped,
)
from rollstream.environments.registry import admit, first_world, public_view, world_of
from rollstream.errors import Refused
from rollstream.models.protocol import Completion
from rollstream.testing.playing import opened
from schemas.action import ToolCall, Utterance
from schemas.session import Submission
from schemas.values import ChatMessage, JsonObject
from schemas.verdict import StepReward

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


_NESTED: JsonObject = {"a": "x"}
for _ in range(90):
    _NESTED = {"a": [_NESTED]}
HOSTILE_ARGUMENTS: tuple[JsonObject, ...] = (
    {},
    {"zz_unknown": 1},
    {"count": None, "city": 7, "name": [], "id": {}},
    {"count": 2**62, "city": "x" * 1_000_000, "name": "\x00\u202e"},
    _NESTED,
)


class NoModels:
    """`RoleModels` of a run that binds none."""

    async def complete(self, messages: Sequence[ChatMessage], role: str) -> Completion:
        raise AssertionError(f"a model of role {role} was asked; override `step_services` to give one")


class EnvironmentConformance:
    """Inherit, under a name that begins with `Test`, and say which environment and which rows."""

    grader_timeout_s = 3.0
    hostile_time_s = 30.0
    """Longest that scoring one hostile submission may take, deadline of the grader included."""
    deterministic_steps = True
    """False for an environment whose steps ask a model or roll dice: then only the first outcome of an action counts."""

    def environment(self) -> Environment[Any]:
        raise NotImplementedError("return the environment under test")

    def rows(self) -> Sequence[Mapping[str, object]]:
        """At least one; with two or more, fields are swapped between them to find leaks."""
        raise NotImplementedError("return rows that the environment admits")

    def services(self, graders: Graders) -> Services:
        """What `verify` may use here."""
        return Services(graders=graders)

    def step_services(self, index: int, opened: OpenServices | None = None) -> StepServices:
        """What steps may use here."""
        return StepServices(NoModels(), index, opened)

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
        for (task, reference), verdict in zip(scored, self._verdicts(scored, acting=True), strict=True):
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

    def test_metrics_of_its_own_are_finite_numbers(self) -> None:
        environment = self.environment()
        if not isinstance(environment, AggregatesMetrics):
            return
        empty = [(task, Submission()) for _, task in self._tasks()]
        scored = [
            ScoredVerdict(str(number), 0, verdict.reward or 0.0, verdict.success, verdict.components, verdict.diagnostics)
            for number, verdict in enumerate(self._verdicts(empty))
        ]
        of_an_older_version = ScoredVerdict(None, 0, 0.0, None, {}, {})
        for verdicts in (scored, [*scored, of_an_older_version], [of_an_older_version]):
            for name, value in environment.aggregate_metrics(iter(verdicts)).items():
                assert isinstance(value, int | float), f"{name} is {value!r}"
                assert math.isfinite(value), f"{name} is {value!r}"

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
            # A solution names the tools that it calls, and whoever is to call them sees their names.
            tools = " ".join(offered_names(self.environment().seed(task)))
            public = f"{json.dumps(public_view(self.environment(), row))} {tools}"
            for field in self._private(row):
                for text in _texts(row[field]):
                    escaped = json.dumps(text)[1:-1]
                    leaks = len(text) >= 12 and escaped not in public and escaped in shown
                    assert not leaks, f"the agent sees {text!r:.100}, which is the private {field}"

    def test_the_actions_of_the_reference_are_seen_and_leave_the_world_they_were_given_alone(self) -> None:
        for environment, task in self._stepped_tasks():
            asyncio.run(self._act_out(environment, task))

    async def _act_out(self, environment: SteppedEnvironment[Any, Any], task: Task) -> None:
        async with opened(environment, first_world(environment, task)) as begun:
            for index, action in enumerate(environment.reference_actions(task)):
                world, services = begun.world, self.step_services(index, begun.services)
                assert world is not None
                before = world.model_dump_json()
                after, result = await environment.step(world, action, services)
                assert world.model_dump_json() == before, f"{action} changed the world it was given"
                seen_of(environment.name, action, result, 1_000_000)
                if self.deterministic_steps and (begun.services is None or not begun.services.live):
                    again, _ = await environment.step(world, action, services)
                    assert again == after, f"{action} made twice gives {after} and {again}"
                assert world_of(environment, after.model_dump_json()) == after, f"a world does not survive its receipt: {after}"
                begun.world = after

    def test_a_world_begins_alike_whenever_it_begins(self) -> None:
        for environment, task in self._stepped_tasks():
            world = first_world(environment, task)
            assert world == first_world(environment, task), f"two worlds of {task} differ"
            assert world_of(environment, world.model_dump_json()) == world, f"a world does not survive its receipt: {world}"

    def test_hostile_actions_are_answered(self) -> None:
        for environment, task in self._stepped_tasks():
            for action in self._hostile_actions(environment.seed(task)):
                asyncio.run(self._answered(environment, task, action))
            return

    async def _answered(self, environment: SteppedEnvironment[Any, Any], task: Task, action: ToolCall | Utterance) -> None:
        async with opened(environment, first_world(environment, task)) as begun:
            _, result = await environment.step(begun.world, action, self.step_services(0, begun.services))
            seen_of(environment.name, action, result, 1_000_000)

    def _hostile_actions(self, seeded: Seeded) -> Iterator[ToolCall | Utterance]:
        if seeded.interaction != "tools":
            yield from (Utterance(text=text) for text in ("", *HOSTILE.values()) if text.isprintable() or text.isascii())
            return
        for name in (*offered_names(seeded), "zz_no_such_tool"):
            yield from (ToolCall(id="hostile", name=name, arguments=arguments) for arguments in HOSTILE_ARGUMENTS)
        yield Utterance(text="I would rather talk.")

    def _stepped_tasks(self) -> Iterator[tuple[SteppedEnvironment[Any, Any], Task]]:
        """Tasks of an environment that answers back; none of any other."""
        environment = self.environment()
        if is_stepped(environment):
            yield from ((environment, task) for _, task in self._tasks())

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

    def _verdicts(self, submissions: Sequence[tuple[Task, Submission]], *, acting: bool = False) -> list[Verdict]:
        """Score in an event loop and a pool of graders of their own, and check what holds of every verdict.

        Args:
            acting: whether the actions of the reference go before.
        """
        verdicts = asyncio.run(self._verify(submissions, acting))
        for verdict in verdicts:
            numbers = [verdict.reward, *verdict.components.values()]
            assert all(isinstance(number, float) and math.isfinite(number) for number in numbers), f"not finite: {verdict}"
            text = json.dumps(dict(verdict.diagnostics), allow_nan=False, ensure_ascii=False)
            assert not re.search("[\ud800-\udfff]", text), f"a lone surrogate, which cannot stand in the log: {verdict}"
        return verdicts

    async def _verify(self, submissions: Sequence[tuple[Task, Submission]], acting: bool) -> list[Verdict]:
        environment = self.environment()
        verdicts: list[Verdict] = []
        async with GraderPool(1, self.grader_timeout_s) as graders:
            for task, submission in submissions:
                messages = [*environment.seed(task).messages, ChatMessage(role="assistant", content=submission.text)]
                world, steps = await self._end_of(environment, task, acting)
                episode = Episode(messages, submission, "completed", world, steps)
                verdicts.append(await environment.verify(task, episode, self.services(graders)))
        return verdicts

    async def _end_of(self, environment: Environment[Any], task: Task, acting: bool) -> tuple[World | None, list[StepReward]]:
        if not is_stepped(environment):
            return None, []
        steps: list[StepReward] = []
        actions = environment.reference_actions(task) if acting else ()
        if not actions:
            return first_world(environment, task), steps
        async with opened(environment, first_world(environment, task)) as begun:
            for index, action in enumerate(actions):
                begun.world, result = await environment.step(begun.world, action, self.step_services(index, begun.services))
                steps.append(StepReward(index=index, reward=result.reward))
                if result.done or result.truncated:
                    break
        return begun.world, steps


def offered_names(seeded: Seeded) -> list[str]:
    """Names of the tools that a task offers."""
    return [str(function["name"]) for tool in seeded.tools if isinstance(function := tool.get("function"), dict)]


def _shown(seeded: Seeded) -> str:
    """Everything of a seed that reaches the agent, as JSON."""
    shown = {
        "messages": seeded.messages,
        "tools": seeded.tools,
        "interaction": seeded.interaction,
        "placement": seeded.placement,
        "sandbox": seeded.sandbox and seeded.sandbox.model_dump(mode="json"),
        "workspace": seeded.workspace and seeded.workspace.model_dump(mode="json"),
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
