-- What people ask of the store. Every view is a function of the event tables alone, so a store that was rebuilt from the log
-- answers the same.

-- Unbiased estimates from n attempts of which c succeeded; NULL for fewer attempts than k. At least one of k succeeds (Chen et al.,
-- 2021): 1 - C(n - c, k) / C(n, k). All k succeed (Yao et al., 2024): C(c, k) / C(n, k).
CREATE OR REPLACE MACRO pass_at_k(n, c, k) AS CASE
    WHEN k > n THEN NULL
    WHEN c = 0 THEN 0.0
    WHEN n - c < k THEN 1.0
    ELSE 1.0 - list_product(list_transform(range(n - c + 1, n + 1), lambda i: 1.0 - k::DOUBLE / i))
END;
CREATE OR REPLACE MACRO pass_hat_k(n, c, k) AS CASE
    WHEN k > n THEN NULL
    WHEN c < k THEN 0.0
    ELSE list_product(list_transform(range(0, k), lambda i: (c - i)::DOUBLE / (n - i)))
END;

-- A payload; one that is too long for one value is put together again. Asked for each event, so that one event costs one event.
CREATE OR REPLACE MACRO whole_payload(event_kind, id, payload) AS CASE
    WHEN payload IS NOT NULL THEN payload
    ELSE (
        SELECT string_agg(part.text, '' ORDER BY part.part)
        FROM long_payloads AS part
        WHERE part.event_id = id AND part.kind = event_kind
    )
END;

-- What a call said that it cost, as it can be added up in any order with one result. NULL beyond 10^15, so that no sum overflows.
CREATE OR REPLACE MACRO exact_usd(cost_usd) AS TRY_CAST(cost_usd AS DECIMAL(27, 12));
-- Seconds, in the same way; NULL beyond 10^18.
CREATE OR REPLACE MACRO exact_seconds(seconds) AS TRY_CAST(seconds AS DECIMAL(27, 9));
-- Tokens, in the same way; NULL beyond 10^12, which no call had.
CREATE OR REPLACE MACRO exact_tokens(tokens) AS CASE WHEN abs(tokens::HUGEINT) <= 1000000000000 THEN tokens END;

-- One row a group: what is public of its task. Told by the task itself, else by a session, else by a terminal record; of several,
-- by the first.
CREATE OR REPLACE VIEW tasks AS
SELECT
    run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(attempts, 1) AS size,
    harness, model, occurred_at AS submitted_at
FROM task_submitted
WHERE group_id IS NOT NULL AND rowid NOT IN (
    SELECT rowid
    FROM task_submitted
    WHERE group_id IN (SELECT group_id FROM task_submitted GROUP BY group_id HAVING count(*) > 1)
    QUALIFY row_number() OVER (PARTITION BY group_id ORDER BY kafka_partition, kafka_offset) > 1
)
UNION ALL
SELECT * EXCLUDE (told_by, kafka_partition, kafka_offset)
FROM (
    SELECT DISTINCT ON (group_id) *
    FROM (
        SELECT
            run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(group_size, 1) AS size,
            harness, model, submitted_at, 1 AS told_by, kafka_partition, kafka_offset
        FROM session_ready ANTI JOIN task_submitted USING (group_id)
        UNION ALL
        SELECT
            run_id, environment, dataset, split, task_id, task_index, epoch, group_id, coalesce(group_size, 1),
            harness, model, submitted_at, 2, kafka_partition, kafka_offset
        FROM rollout_scored ANTI JOIN task_submitted USING (group_id)
    )
    ORDER BY group_id, told_by, kafka_partition, kafka_offset
);

-- The terminal record that counts of each attempt: the highest (round, revision), and of those the first by offset. Nearly all
-- attempts have one record, so those that have several are looked at alone; they are in groups with fewer indices (the bits of a
-- number, where an index from 64 on may look like another one) than records.
CREATE OR REPLACE VIEW counting AS
SELECT rowid AS record, *
FROM rollout_scored
WHERE rowid NOT IN (
    SELECT rowid
    FROM rollout_scored
    WHERE group_id IN (
        SELECT group_id
        FROM rollout_scored
        GROUP BY group_id
        HAVING coalesce(bit_count(bit_or(1::UBIGINT << (group_index % 64))), 0) < count(*)
    )
    QUALIFY row_number() OVER (
        PARTITION BY rollout_id ORDER BY round DESC, revision DESC, kafka_offset, kafka_partition
    ) > 1
);

-- One row an attempt that has ended. What a record made of headers alone does not tell is filled in from its group.
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
    record.queued_s, record.agent_s, record.environment_s, record.model_s, record.verify_s,
    coalesce(record.submission_artifact, record.submission_text) AS submission,
    record.mask_loss, record.mask_baseline, record.verdict_id,
    coalesce(record.submitted_at, task.submitted_at) AS submitted_at,
    record.seeded_at,
    record.occurred_at AS scored_at,
    record.event_id, record.payload, record.record, record.kafka_partition, record.kafka_offset
FROM counting AS record LEFT JOIN tasks AS task USING (group_id);

CREATE OR REPLACE VIEW rollouts AS
SELECT * EXCLUDE (event_id, payload, record, kafka_partition, kafka_offset) FROM counting_records;

-- Rollouts with what was said.
CREATE OR REPLACE VIEW trajectories AS
SELECT * EXCLUDE (whole), whole -> '$.messages' AS messages, whole -> '$.tools' AS tools
FROM (
    SELECT
        * EXCLUDE (event_id, payload, record, kafka_partition, kafka_offset),
        whole_payload('RolloutScored', event_id, payload) AS whole
    FROM counting_records
);

-- One row a model call, of every try and every execution: what happened, and what it cost. `counts` is true where it is part of
-- the trajectory that counts. Each session is looked up by its rollout too: a question about one rollout then stays with it.
CREATE OR REPLACE VIEW steps AS
SELECT
    run_id, environment, task_id, group_id, rollout_id, session_id, round, try, execution_id, worker, source, step_index, role,
    turn, model, finish_reason, prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, started_at, duration_s,
    attempts, policy_version,
    whole_payload('AgentStepped', event_id, payload) -> '$.message' AS message,
    coalesce(list_contains((
        SELECT flatten(list(from_json(episode.steps, '["UUID"]')))
        FROM episode_completed AS episode SEMI JOIN counting USING (rollout_id, session_id)
        WHERE episode.rollout_id = step.rollout_id AND episode.session_id = step.session_id
    ), event_id), false) AS counts,
    occurred_at
FROM agent_stepped AS step;

-- The steps of some rollouts, in order: `FROM steps_of(['…', '…'])`.
CREATE OR REPLACE MACRO steps_of(ids) AS TABLE
SELECT * FROM steps WHERE list_contains(ids, rollout_id) ORDER BY rollout_id, round, try, occurred_at, execution_id, step_index;

-- One row a group, ended or not. Scored means that there is a reward; errored and cancelled attempts have none.
CREATE OR REPLACE VIEW groups AS
WITH ended AS (
    SELECT
        group_id,
        list_unique(list(group_index)) AS ended,
        count(reward) AS scored,
        count(*) FILTER (success) AS succeeded,
        count(*) FILTER (status = 'errored') AS errored,
        count(*) FILTER (status = 'cancelled') AS cancelled,
        -- In one order, so that its last bits do not depend on where rows stand.
        avg(reward ORDER BY group_index) AS mean_reward,
        min(reward) AS min_reward,
        max(reward) AS max_reward,
        max(occurred_at) AS ended_at
    FROM counting
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

-- pass@k and pass^k of scored attempts, averaged over groups, for k = 1, 2, 4, … and the group's size. An attempt without a score is
-- no failure: it lowers `coverage` (scored of attempted), and a group with fewer than k scored attempts is in `groups` alone.
-- Groups that came out alike have the same estimate, which is made once.
CREATE OR REPLACE VIEW pass_estimates AS
WITH ended AS (
    -- What `groups` says too; asked for alone, it is less work.
    SELECT group_id, count(reward) AS scored, count(*) FILTER (success) AS succeeded FROM counting GROUP BY group_id
), alike AS (
    SELECT
        run_id, environment, size, coalesce(scored, 0) AS scored, coalesce(succeeded, 0) AS succeeded, count(*) AS groups
    FROM tasks LEFT JOIN ended USING (group_id)
    GROUP BY ALL
), k AS (
    SELECT unnest([1, 2, 4, 8, 16, 32, 64, 128]) AS k
    UNION
    SELECT DISTINCT size FROM alike
)
SELECT
    run_id, environment, k,
    sum(groups * pass_at_k(scored, succeeded, k) ORDER BY size, scored, succeeded) / sum(groups) FILTER (scored >= k) AS at_k,
    sum(groups * pass_hat_k(scored, succeeded, k) ORDER BY size, scored, succeeded) / sum(groups) FILTER (scored >= k) AS hat_k,
    coalesce(sum(groups) FILTER (scored >= k), 0)::BIGINT AS groups_estimated,
    sum(groups)::BIGINT AS groups,
    sum(groups * scored) / sum(groups * size) AS coverage
FROM alike JOIN k ON k <= size
GROUP BY run_id, environment, k;

CREATE OR REPLACE VIEW pass_at_k AS
SELECT run_id, environment, k, at_k AS pass_at_k, groups_estimated, groups, coverage
FROM pass_estimates
ORDER BY run_id, environment, k;

CREATE OR REPLACE VIEW pass_hat_k AS
SELECT run_id, environment, k, hat_k AS pass_hat_k, groups_estimated, groups, coverage
FROM pass_estimates
ORDER BY run_id, environment, k;

CREATE OR REPLACE VIEW failures AS
SELECT
    run_id, environment, dataset, task_id, group_id, rollout_id, session_id, round, try, error_stage, error_kind, error_retryable,
    error_message, scored_at
FROM rollouts
WHERE status = 'errored';

-- Tokens of every recorded model call, of agents and of environments, repeated tries included: what the run cost. `cost_usd` is of
-- those calls that said what they cost.
CREATE OR REPLACE VIEW usage AS
SELECT
    run_id, environment, role, model,
    count(*) AS calls,
    count(DISTINCT rollout_id) AS rollouts,
    sum(exact_tokens(prompt_tokens))::BIGINT AS prompt_tokens,
    sum(exact_tokens(completion_tokens))::BIGINT AS completion_tokens,
    sum(exact_tokens(cached_tokens))::BIGINT AS cached_tokens,
    sum(exact_tokens(reasoning_tokens))::BIGINT AS reasoning_tokens,
    sum(exact_seconds(duration_s))::DOUBLE AS model_s,
    sum(exact_usd(cost_usd))::DOUBLE AS cost_usd
FROM (
    SELECT
        run_id, environment, rollout_id, role, model, prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, duration_s,
        cost_usd
    FROM agent_stepped
    UNION ALL
    SELECT
        run_id, environment, rollout_id, role, model, prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, duration_s,
        cost_usd
    FROM environment_called
)
GROUP BY run_id, environment, role, model
ORDER BY run_id, environment, role, model;

-- One row an attempt that has ended, and where its time went, in seconds. Of the session that counts, but for `seeding_s`, which has
-- the time in the queue of tasks and every session before.
CREATE OR REPLACE VIEW timing AS
SELECT
    *,
    greatest(total_s - coalesce(seeding_s, 0) - coalesce(queued_s, 0) - coalesce(agent_s, 0) - coalesce(verify_s, 0), 0) AS other_s
FROM (
    SELECT
        run_id, environment, task_id, group_id, rollout_id, status, submitted_at, seeded_at, scored_at,
        epoch(seeded_at - submitted_at) AS seeding_s,
        queued_s, agent_s, environment_s, model_s,
        greatest(agent_s - coalesce(environment_s, 0) - model_s, 0) AS harness_s,
        verify_s,
        epoch(scored_at - submitted_at) AS total_s
    FROM counting_records
);

-- One row an action that earned something, of every session, ended or not. `step` counts the session's actions. `counts` is true
-- where the action is part of the trajectory that counts.
CREATE OR REPLACE VIEW step_rewards AS
SELECT
    run_id, environment, task_id, group_id, rollout_id, session_id, round, try, action_index AS step, reward,
    components::JSON AS components,
    whole_payload('StepRewarded', event_id, payload) -> '$.info' AS info,
    action_id IN (
        SELECT unnest(from_json(actions, '["VARCHAR"]'))
        FROM episode_completed
        WHERE session_id IN (SELECT session_id FROM rollouts)
    ) AS counts,
    occurred_at
FROM step_rewarded;

-- One row a tool call in the transcripts that count, with what came back. The result is the next tool message with the call's id.
CREATE OR REPLACE VIEW tool_calls AS
WITH said AS (
    SELECT
        * EXCLUDE (messages),
        unnest(messages) AS message,
        unnest(range(len(messages))) AS message_index
    FROM (
        SELECT
            run_id, environment, task_id, group_id, rollout_id, session_id,
            from_json(whole_payload('RolloutScored', event_id, payload) -> '$.messages', '["JSON"]') AS messages
        FROM counting_records
    )
), called AS (
    SELECT
        * EXCLUDE (message, calls),
        unnest(calls) AS call,
        unnest(range(len(calls))) AS call_index
    FROM (
        SELECT *, from_json(message -> '$.tool_calls', '["JSON"]') AS calls
        FROM said
        WHERE message ->> '$.role' = 'assistant'
    )
), returned AS (
    SELECT
        rollout_id, message ->> '$.tool_call_id' AS tool_call_id, message_index AS returned_index, message ->> '$.content' AS result
    FROM said
    WHERE message ->> '$.role' = 'tool'
)
SELECT
    run_id, environment, task_id, group_id, called.rollout_id, session_id, message_index, call_index,
    call ->> '$.id' AS tool_call_id,
    coalesce(call ->> '$.function.name', call ->> '$.custom.name') AS tool,
    coalesce(call ->> '$.function.arguments', call ->> '$.custom.input') AS arguments,
    result
FROM called ASOF LEFT JOIN returned
    ON returned.rollout_id = called.rollout_id AND returned.tool_call_id = call ->> '$.id' AND returned.returned_index > message_index;

-- Attempts to learn from: scored, and not masked. What trainers and exports choose from.
CREATE OR REPLACE VIEW trainable AS
SELECT *
FROM counting_records
WHERE reward IS NOT NULL AND mask_loss IS NOT TRUE AND status IN ('completed', 'truncated');

-- Every success, whole. Heavy: name the columns you need.
CREATE OR REPLACE VIEW sft_examples AS
SELECT * EXCLUDE (whole), whole -> '$.messages' AS messages, whole -> '$.tools' AS tools
FROM (
    SELECT
        run_id, environment, dataset, split, task_id, group_id, group_index, rollout_id, model, reward, completion_tokens,
        whole_payload('RolloutScored', event_id, payload) AS whole
    FROM trainable
    WHERE success
);

-- The best against the worst attempt of each group; of equals the first of the group. Groups of equal rewards give no pair.
CREATE OR REPLACE VIEW preference_pairs AS
SELECT
    min(run_id) AS run_id, min(environment) AS environment, min(dataset) AS dataset, min(task_id) AS task_id, group_id,
    arg_max(rollout_id, (reward, -group_index)) AS chosen,
    arg_min(rollout_id, (reward, group_index)) AS rejected,
    max(reward) AS chosen_reward,
    min(reward) AS rejected_reward,
    max(reward) - min(reward) AS margin,
    count(*) AS attempts
FROM trainable
GROUP BY group_id
HAVING max(reward) > min(reward)
ORDER BY group_id;

-- One row an attempt that has ended, with its advantage over its group: (reward - mean) / standard deviation of the attempts that
-- count in the baseline, 0 where those are all alike, NULL where there is no reward.
CREATE OR REPLACE VIEW grpo_groups AS
SELECT
    run_id, environment, dataset, task_id, group_id, group_size, group_index, rollout_id, status, reward, mask_loss, mask_baseline,
    count(*) OVER peers >= group_size AS complete,
    count(counted) OVER peers AS counted,
    avg(counted) OVER peers AS group_mean,
    stddev_pop(counted) OVER peers AS group_std,
    CASE
        WHEN stddev_pop(counted) OVER peers > 1e-8
        THEN (reward - avg(counted) OVER peers) / stddev_pop(counted) OVER peers
        ELSE 0 * reward
    END AS advantage
FROM (SELECT *, CASE WHEN mask_baseline IS NOT TRUE THEN reward END AS counted FROM counting_records)
WINDOW peers AS (
    PARTITION BY group_id ORDER BY group_index ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
)
ORDER BY group_id, group_index;


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
        sum(mean_reward * scored ORDER BY group_id) / nullif(sum(scored), 0) AS mean_reward,
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
SELECT * REPLACE (whole_payload(kind, event_id, payload) AS payload)
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
    UNION ALL
    SELECT 'ActionRequested', 'env.actions', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM action_requested
    UNION ALL
    SELECT 'ObservationReturned', 'env.observations', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM observation_returned
    UNION ALL
    SELECT 'StepRewarded', 'rewards.steps', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM step_rewarded
    UNION ALL
    SELECT 'EnvironmentCalled', 'rewards.steps', kafka_partition, kafka_offset, event_id, occurred_at, recorded_at,
        run_id, group_id, rollout_id, session_id, payload
    FROM environment_called
) AS event;

-- What happened in a session, in order: model calls, the actions they asked for, what the agent saw of them, what they earned.
-- `counts` is true where it is part of the session's completed trajectory; what a taken-over execution left besides is not.
CREATE OR REPLACE VIEW trajectory_events AS
WITH event AS (
    SELECT
        0 AS rank, 'call' AS what, event_id, event_id AS step_id, NULL::UUID AS action_id, NULL::BIGINT AS action_index,
        NULL::DOUBLE AS reward, whole_payload('AgentStepped', event_id, payload) -> '$.message' AS content, occurred_at,
        run_id, environment, task_id, group_id, rollout_id, session_id, round, try
    FROM agent_stepped
    UNION ALL
    SELECT
        1, 'action', event_id, TRY_CAST(step_id AS UUID), event_id, action_index, NULL,
        whole_payload('ActionRequested', event_id, payload) -> '$.action', occurred_at,
        run_id, environment, task_id, group_id, rollout_id, session_id, round, try
    FROM action_requested
    UNION ALL
    SELECT
        2, 'observation', event_id, NULL, TRY_CAST(action_id AS UUID), action_index, NULL,
        whole_payload('ObservationReturned', event_id, payload) -> '$.messages', occurred_at,
        run_id, environment, task_id, group_id, rollout_id, session_id, round, try
    FROM observation_returned
    UNION ALL
    SELECT
        3, 'reward', event_id, NULL, TRY_CAST(action_id AS UUID), action_index, reward,
        whole_payload('StepRewarded', event_id, payload) -> '$.components', occurred_at,
        run_id, environment, task_id, group_id, rollout_id, session_id, round, try
    FROM step_rewarded
), counted AS (
    SELECT TRY_CAST(unnest(from_json(steps, '["VARCHAR"]')) AS UUID) AS id FROM episode_completed
    UNION
    SELECT TRY_CAST(unnest(from_json(actions, '["VARCHAR"]')) AS UUID) FROM episode_completed
)
SELECT
    run_id, environment, task_id, group_id, rollout_id, session_id, round, try,
    row_number() OVER (
        PARTITION BY session_id
        ORDER BY coalesce(step_index, -1), coalesce(action_index, -1), rank, event.occurred_at, event.event_id
    ) - 1 AS position,
    what, step_index, action_index, content, reward,
    coalesce(action_id, event.step_id) IN (SELECT id FROM counted) AS counts,
    event.occurred_at, event.event_id
FROM event
LEFT JOIN (SELECT event_id AS action_id, TRY_CAST(step_id AS UUID) AS asked_by FROM action_requested) AS asked USING (action_id)
LEFT JOIN (SELECT event_id AS step_id, step_index FROM agent_stepped) AS step ON step.step_id = coalesce(event.step_id, asked_by);

-- One row an attempt and revision that was to be verified once more. `reward_before` is what counted until then.
CREATE OR REPLACE VIEW regrades AS
WITH numbered AS (
    SELECT *, coalesce(TRY_CAST(payload ->> '$.revision' AS BIGINT), 0) AS revision
    FROM retry_scheduled WHERE stage = 'verification'
), asked AS (
    SELECT DISTINCT ON (rollout_id, round, revision) * FROM numbered WHERE revision > 0
    ORDER BY rollout_id, round, revision, kafka_partition, kafka_offset
), records AS (
    SELECT
        asked.rollout_id, asked.round, asked.revision, ended.reward, ended.status, ended.environment_version,
        (ended.round, ended.revision) AS place, (asked.round, asked.revision) AS wanted, -ended.kafka_offset AS earliest
    FROM asked JOIN rollout_scored AS ended USING (rollout_id)
), told AS (
    SELECT
        rollout_id, round, revision,
        bool_or(place >= wanted) AS passed,
        arg_max_null(reward, (place, earliest)) FILTER (place < wanted) AS reward_before,
        arg_max_null(reward, earliest) FILTER (place = wanted) AS reward,
        arg_max_null(status, earliest) FILTER (place = wanted) AS status,
        arg_max_null(environment_version, earliest) FILTER (place = wanted) AS environment_version
    FROM records GROUP BY rollout_id, round, revision
)
SELECT
    run_id, environment, dataset, task_id, group_id, rollout_id, session_id, round, try, revision,
    payload ->> '$.environment_version' AS wanted_version,
    environment_version, status, reward_before, reward, NOT coalesce(passed, false) AS waiting, occurred_at AS asked_at
FROM asked LEFT JOIN told USING (rollout_id, round, revision);


-- Sessions whose prompt has a text of their task's grading data. The text itself stays private.
CREATE OR REPLACE VIEW contamination AS
SELECT
    found.run_id, task.environment, task.dataset, task.task_id, group_id, found.rollout_id, found.session_id, found.field,
    found.in_task
FROM contaminated AS found LEFT JOIN tasks AS task USING (group_id);
