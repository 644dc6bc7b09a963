"""Exports, read and trained on by the programs that they are for, each with its own packages beside ours."""
