"""The topics: their names, keys, sizes and events."""
