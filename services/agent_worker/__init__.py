"""sessions.ready ─▶ harness plays ─▶ agent.steps, episodes.completed. Knows no environment and opens no ticket."""
