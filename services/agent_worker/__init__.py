"""sessions.ready ─▶ harness plays ─▶ agent.steps, env.actions, episodes.completed; env.observations come back on the side.

Knows no environment and opens neither tickets nor receipts.
"""
