"""episodes.completed ─▶ verify ─▶ verdicts, rollouts.scored. The environment scores what the agent handed in."""
