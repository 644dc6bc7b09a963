"""Failure x attempt -> delay or give up."""

from hypothesis import given, strategies as st

from rollstream.eventlog.retries import Backoff, RetryPolicy, plan
from schemas.failure import ErrorInfo

POLICY = RetryPolicy(
    default=Backoff(attempts=3, first_s=1, factor=2, most_s=60),
    by_stage={"verification": Backoff(attempts=5)},
    by_kind={"model_rate_limited": Backoff(attempts=8, first_s=10)},
)


def failure(kind: str = "model_unavailable", stage: str = "agent", retryable: bool = True) -> ErrorInfo:
    return ErrorInfo.model_validate({"kind": kind, "stage": stage, "message": "m", "retryable": retryable})


def test_what_a_retry_cannot_help_is_given_up_at_once() -> None:
    assert plan(POLICY, failure(retryable=False), 1, "r") is None


def test_a_stage_runs_as_often_as_its_policy_says_and_no_more() -> None:
    assert plan(POLICY, failure(), 2, "r") is not None
    assert plan(POLICY, failure(), 3, "r") is None
    assert plan(POLICY, failure(stage="verification", kind="grader_crashed"), 4, "r") is not None
    assert plan(POLICY, failure(stage="verification", kind="grader_crashed"), 5, "r") is None


def test_the_kind_of_a_failure_is_looked_up_before_its_stage() -> None:
    delay = plan(POLICY, failure(kind="model_rate_limited", stage="verification"), 7, "r")
    assert delay is not None
    assert delay >= 150


@given(failures=st.integers(1, 500), rollout=st.text(max_size=20))
def test_a_delay_is_bounded_spread_and_the_same_when_planned_again(failures: int, rollout: str) -> None:
    policy = RetryPolicy(default=Backoff(attempts=1_000, first_s=1, factor=2, most_s=60))
    delay = plan(policy, failure(), failures, rollout)
    assert delay is not None
    assert delay == plan(policy, failure(), failures, rollout)
    middle = min(60, 2.0 ** (failures - 1))
    assert 0.5 * middle <= delay < 1.5 * middle


def test_rollouts_that_fail_together_do_not_come_back_together() -> None:
    delays = {plan(POLICY, failure(), 1, f"rollout-{number}") for number in range(100)}
    assert len(delays) == 100
