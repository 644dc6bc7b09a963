"""tasks.in ─▶ seed ─▶ sessions.ready; env.actions ─▶ step ─▶ env.observations, rewards.steps.

The environment accepts a task once for each attempt; grading data and worlds leave sealed.
"""
