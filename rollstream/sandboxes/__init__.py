"""Sandboxes: where commands of agents and of verification run. `protocol` is the seam; `registry` knows the providers."""
