"""Harnesses: the agent side of an episode. `protocol` is the contract, `registry` finds them; none knows an environment."""
