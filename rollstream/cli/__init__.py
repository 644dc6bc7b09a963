"""The `rollstream` command. One module per command group; this one only puts them together."""
