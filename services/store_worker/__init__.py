"""Every topic ─▶ DuckDB. One process of it is enough, and a second one is refused."""
