"""Workers and brokers that die, freeze and come back while work is under way; what happened is then read from the log alone.

Every choice hangs on a seed: `CHAOS_SEED=7 CHAOS_FULL=1 pytest -s tests/chaos`. Without `CHAOS_FULL` each test runs its
short form.
"""
