"""The trajectory store: the log, projected into DuckDB, and what people read from it.

    log ─▶ feed ─▶ projection ─▶ store/store.duckdb ─copy─▶ trajectories.duckdb ─▶ reader ─▶ SQL, reports, `show`
                        └──────▶ store/private.duckdb       (grading data never enters the file that is copied)

One process writes; everybody else reads the published copy, which is replaced and never changed.
"""
