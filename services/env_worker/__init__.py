"""tasks.in ─▶ seed ─▶ sessions.ready. The environment accepts a task once for each attempt; grading data leaves sealed."""
