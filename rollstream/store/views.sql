-- What people ask of the store. Every view is a function of the event tables alone, so a store that was rebuilt from the log
-- answers the same.

-- Unbiased estimate from n attempts of which c succeeded (Chen et al., 2021). NULL for fewer attempts than k.
CREATE OR REPLACE MACRO pass_at_k(n, c, k) AS CASE
    WHEN k > n THEN NULL
    WHEN c = 0 THEN 0.0
    WHEN n - c < k THEN 1.0
    ELSE 1.0 - list_product(list_transform(range(n - c + 1, n + 1), lambda i: 1.0 - k::DOUBLE / i))
END;

-- Payloads that are too long for one value, put together again.
CREATE OR REPLACE VIEW whole_payloads AS
SELECT kind, event_id, string_agg(text, '' ORDER BY part) AS whole FROM long_payloads GROUP BY kind, event_id;

-- One row a group: what is public of its task. Told by the task itself, else by a session, else by a terminal record.
CREATE OR REPLACE VIEW tasks AS
SELECT DISTINCT ON (group_id) * EXCLUDE (told_by, kafka_partition, kafka_offset)
FROM (
    SELECT
        run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(attempts, 1) AS size,
        harness, model, occurred_at AS submitted_at, 0 AS told_by, kafka_partition, kafka_offset
    FROM task_submitted
    WHERE group_id IS NOT NULL
    UNION ALL
    SELECT
        run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(group_size, 1),
        harness, model, submitted_at, 1, kafka_partition, kafka_offset
    FROM session_ready
    UNION ALL
    SELECT
        run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(group_size, 1),
        harness, model, submitted_at, 2, kafka_partition, kafka_offset
    FROM rollout_scored
)
ORDER BY group_id, told_by, kafka_partition, kafka_offset;

-- One row an attempt that has ended. Of its records the one that counts has the highest (round, revision), and of those is the
-- first by offset. What a record made of headers alone does not tell is filled in from its group.
CREATE OR REPLACE VIEW counting_records AS
SELECT
    record.run_id, record.environment,
    coalesce(record.dataset, task.dataset) AS dataset,
    coalesce(record.split, task.split) AS split,
    coalesce(record.task_id, task.task_id) AS task_id,
    coalesce(record.epoch, task.epoch) AS epoch,
    record.group_id, record.group_size, record.group_index, record.rollout_id, record.session_id, record.round, record.try,
    record.revision, record.status, record.stop_reason, record.reward, record.success,
    record.reward_components::JSON AS reward_components,
    record.error_kind, record.error_stage, record.error_message, record.error_retryable,
    coalesce(record.harness, task.harness) AS harness,
    coalesce(record.model, task.model) AS model,
    record.served_model, record.environment_version, record.harness_version,
    record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.reasoning_tokens,
    coalesce(record.calls, 0) AS calls,
    record.queued_s, record.agent_s, record.model_s, record.verify_s,
    coalesce(record.submission_artifact, record.submission_text) AS submission,
    record.mask_loss, record.mask_baseline, record.verdict_id,
    coalesce(record.submitted_at, task.submitted_at) AS submitted_at,
    record.seeded_at,
    record.occurred_at AS scored_at,
    record.event_id, record.payload
FROM rollout_scored AS record
LEFT JOIN tasks AS task USING (group_id)
WHERE record.rowid IN (
    SELECT arg_max(rowid, (round, revision, -kafka_offset, -kafka_partition)) FROM rollout_scored GROUP BY rollout_id
);

CREATE OR REPLACE VIEW rollouts AS SELECT * EXCLUDE (event_id, payload) FROM counting_records;

-- Rollouts with what was said.
CREATE OR REPLACE VIEW trajectories AS
SELECT
    record.* EXCLUDE (event_id, payload),
    coalesce(payload, whole) -> '$.messages' AS messages,
    coalesce(payload, whole) -> '$.tools' AS tools
FROM counting_records AS record
LEFT JOIN (FROM whole_payloads WHERE kind = 'RolloutScored') AS long USING (event_id);

-- One row a model call, of every try and every execution: what happened, and what it cost. `counts` is true where it is part of
-- the trajectory that counts.
CREATE OR REPLACE VIEW steps AS
SELECT
    run_id, environment, task_id, group_id, rollout_id, session_id, round, try, execution_id, worker, source, step_index, role,
    turn, model, finish_reason, prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, started_at, duration_s,
    attempts, policy_version,
    coalesce(payload, whole) -> '$.message' AS message,
    event_id IN (
        SELECT unnest(from_json(steps, '["VARCHAR"]'))::UUID
        FROM episode_completed
        WHERE session_id IN (SELECT session_id FROM rollouts)
    ) AS counts,
    occurred_at
FROM agent_stepped LEFT JOIN (FROM whole_payloads WHERE kind = 'AgentStepped') AS long USING (event_id);

-- One row a group, ended or not. Scored means that there is a reward; errored and cancelled attempts have none.
CREATE OR REPLACE VIEW groups AS
WITH ended AS (
    SELECT
        group_id,
        count(DISTINCT group_index) AS ended,
        count(reward) AS scored,
        count(*) FILTER (success) AS succeeded,
        count(*) FILTER (status = 'errored') AS errored,
        count(*) FILTER (status = 'cancelled') AS cancelled,
        avg(reward) AS mean_reward,
        min(reward) AS min_reward,
        max(reward) AS max_reward,
        max(scored_at) AS ended_at
    FROM rollouts
    GROUP BY group_id
)
SELECT
    run_id, environment, dataset, split, task_id, task_index, epoch, group_id, size,
    coalesce(ended, 0) AS ended,
    coalesce(scored, 0) AS scored,
    coalesce(succeeded, 0) AS succeeded,
    coalesce(errored, 0) AS errored,
    coalesce(cancelled, 0) AS cancelled,
    coalesce(ended, 0) >= size AS complete,
    mean_reward, min_reward, max_reward, harness, model, submitted_at, ended_at
FROM tasks LEFT JOIN ended USING (group_id);

-- pass@k of scored attempts, averaged over groups, for k = 1, 2, 4, … and the group's size. An attempt without a score is no
-- failure: it lowers `coverage` (scored of attempted), and a group with fewer than k scored attempts is in `groups` alone.
CREATE OR REPLACE VIEW pass_at_k AS
WITH k AS (
    SELECT unnest([1, 2, 4, 8, 16, 32, 64, 128]) AS k
    UNION
    SELECT DISTINCT size FROM tasks
)
SELECT
    run_id, environment, k,
    avg(pass_at_k(scored, succeeded, k)) AS pass_at_k,
    count(*) FILTER (scored >= k) AS groups_estimated,
    count(*) AS groups,
    sum(scored) / sum(size) AS coverage
FROM groups JOIN k ON k <= size
GROUP BY run_id, environment, k
ORDER BY run_id, environment, k;

CREATE OR REPLACE VIEW failures AS
SELECT
    run_id, environment, dataset, task_id, group_id, rollout_id, session_id, round, try, error_stage, error_kind, error_retryable,
    error_message, scored_at
FROM rollouts
WHERE status = 'errored';

-- Tokens of every recorded model call, repeated tries included: what the run cost.
CREATE OR REPLACE VIEW usage AS
SELECT
    run_id, environment, role, model,
    count(*) AS calls,
    count(DISTINCT rollout_id) AS rollouts,
    sum(prompt_tokens)::BIGINT AS prompt_tokens,
    sum(completion_tokens)::BIGINT AS completion_tokens,
    sum(cached_tokens)::BIGINT AS cached_tokens,
    sum(reasoning_tokens)::BIGINT AS reasoning_tokens,
    sum(duration_s) AS model_s
FROM agent_stepped
GROUP BY run_id, environment, role, model;

-- One row a run, published or not. `attempted` is what its manifest says, else what its known tasks add up to.
CREATE OR REPLACE VIEW runs AS
WITH seen AS (
    SELECT
        run_id,
        count(*) AS groups,
        sum(size)::BIGINT AS attempted,
        sum(ended)::BIGINT AS ended,
        sum(scored)::BIGINT AS scored,
        sum(succeeded)::BIGINT AS succeeded,
        sum(errored)::BIGINT AS errored,
        sum(cancelled)::BIGINT AS cancelled,
        sum(mean_reward * scored) / nullif(sum(scored), 0) AS mean_reward,
        first(harness ORDER BY submitted_at, group_id) AS harness,
        first(model ORDER BY submitted_at, group_id) AS model,
        min(submitted_at) AS submitted_at,
        max(ended_at) AS ended_at
    FROM groups
    GROUP BY run_id
), published AS (
    SELECT DISTINCT ON (run_id) * FROM run_published ORDER BY run_id, kafka_partition, kafka_offset
), told AS (
    SELECT DISTINCT ON (run_id) run_id, kind, reason FROM run_events ORDER BY run_id, kafka_partition, kafka_offset DESC
)
SELECT
    run_id,
    CASE told.kind WHEN 'RunPaused' THEN 'paused' WHEN 'RunCancelled' THEN 'cancelled' ELSE 'active' END AS state,
    CASE told.kind WHEN 'RunPaused' THEN told.reason END AS paused_because,
    published.dataset,
    published.environments::JSON AS environments,
    coalesce(published.harness, seen.harness) AS harness,
    coalesce(published.model, seen.model) AS model,
    coalesce(published.groups, seen.groups) AS groups,
    coalesce(published.groups * published.attempts, seen.attempted) AS attempted,
    coalesce(ended, 0) AS ended,
    coalesce(scored, 0) AS scored,
    coalesce(succeeded, 0) AS succeeded,
    coalesce(errored, 0) AS errored,
    coalesce(cancelled, 0) AS cancelled,
    mean_reward,
    published.occurred_at AS published_at,
    submitted_at, ended_at
FROM published FULL JOIN seen USING (run_id) LEFT JOIN told USING (run_id);

-- One row a retry: what failed or was held back, and what happens next. `waiting` is true until it has happened.
CREATE OR REPLACE VIEW retries AS
SELECT
    run_id, environment, dataset, task_id, group_id, rollout_id, session_id, round, try, stage, failures, next_round, next_try,
    not_before, cause_kind, cause_stage, cause_message, worker, occurred_at AS scheduled_at,
    NOT EXISTS (
        SELECT 1
        FROM session_ready AS next
        WHERE stage = 'agent' AND next.rollout_id = retry.rollout_id
            AND (next.round, next.try) >= (retry.next_round, retry.next_try)
    ) AND NOT EXISTS (
        SELECT 1 FROM rollout_scored AS ended WHERE ended.rollout_id = retry.rollout_id AND ended.round >= retry.next_round
    ) AND NOT EXISTS (
        SELECT 1
        FROM retry_scheduled AS later
        WHERE later.rollout_id = retry.rollout_id
            AND (later.next_round, later.next_try, later.failures, later.kafka_offset)
                > (retry.next_round, retry.next_try, retry.failures, retry.kafka_offset)
    ) AS waiting
FROM retry_scheduled AS retry;

-- Records that nobody could handle, said by the worker that met them, else by the store; and what was done about each.
CREATE OR REPLACE VIEW dead_letters AS
SELECT
    boundary, reason, original_topic AS topic, original_partition AS kafka_partition, original_offset AS kafka_offset,
    run_id, rollout_id, occurred_at,
    (
        SELECT arg_min(how, settled.kafka_offset) FROM dead_letter_settled AS settled
        WHERE TRY_CAST(settled.letter AS UUID) = dead_lettered.event_id
    ) AS settled
FROM dead_lettered
UNION ALL
SELECT 'store_worker', reason, topic, kafka_partition, kafka_offset, run_id, rollout_id, recorded_at, NULL
FROM dead_rows
WHERE NOT EXISTS (
    SELECT 1
    FROM dead_lettered AS told
    WHERE told.original_topic = dead_rows.topic
        AND told.original_partition = dead_rows.kafka_partition
        AND told.original_offset = dead_rows.kafka_offset
);

-- How far the store had read when this copy was made, and where each partition ended as far as it knew.
CREATE OR REPLACE VIEW lag AS
SELECT
    topic, kafka_partition, next_offset, end_offset,
    greatest(end_offset - next_offset, 0) AS behind,
    last_recorded_at, updated_at
FROM projector_offsets
ORDER BY topic, kafka_partition;

-- Every event, as it stands in the log but for what grades.
CREATE OR REPLACE VIEW events AS
SELECT * EXCLUDE (payload, whole), coalesce(payload, whole) AS payload
FROM (
    SELECT 'RunPublished' AS kind, 'runs.control' AS topic, kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, NULL AS group_id, NULL AS rollout_id, NULL AS session_id, payload
    FROM run_published
    UNION ALL
    SELECT 'TaskSubmitted', 'tasks.in', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, NULL, NULL, payload
    FROM task_submitted
    UNION ALL
    SELECT 'SessionReady', 'sessions.ready', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM session_ready
    UNION ALL
    SELECT 'AgentStepped', 'agent.steps', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM agent_stepped
    UNION ALL
    SELECT 'EpisodeCompleted', 'episodes.completed', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM episode_completed
    UNION ALL
    SELECT 'VerdictReached', 'verdicts', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM verdict_reached
    UNION ALL
    SELECT 'RolloutScored', 'rollouts.scored', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM rollout_scored
    UNION ALL
    SELECT 'RetryScheduled', 'rollouts.retries', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM retry_scheduled
    UNION ALL
    SELECT kind, 'runs.control', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, NULL, NULL, NULL, payload
    FROM run_events
    UNION ALL
    SELECT 'DeadLetterSettled', 'dead.letters', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, NULL, NULL, NULL, payload
    FROM dead_letter_settled
    UNION ALL
    SELECT 'DeadLettered', 'dead.letters', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, NULL, rollout_id, NULL, payload
    FROM dead_lettered
) AS event
LEFT JOIN whole_payloads USING (kind, event_id);
