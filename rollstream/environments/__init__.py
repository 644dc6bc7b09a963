"""Environments: worlds with tasks, and the only authority on reward. `protocol` is the contract, `registry` finds them."""
