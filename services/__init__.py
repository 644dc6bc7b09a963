"""The workers. The topics order the calls; no worker knows another.

    tasks.in ─▶ env_worker ─▶ sessions.ready ─▶ agent_worker ─▶ episodes.completed ─▶ verifier_worker ─▶ rollouts.scored
                                                     └─▶ agent.steps                        └─▶ verdicts
    agent_worker ─▶ env.actions ─▶ any env_worker ─▶ env.observations ─▶ the same agent_worker
                                        └─▶ rewards.steps
    every topic ─▶ store_worker ─▶ DuckDB

Each folder holds `app.py` (wiring: what it consumes and publishes) and `handler.py` (what it does with one record).
`python -m services NAME …` runs the named workers, or all of them, in one process.
"""
