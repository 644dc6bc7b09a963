"""Data sets out of the published store, for trainers.

    request ─▶ selection (which attempts, group by group) ─▶ sft | dpo | grpo | atif (rows) ─▶ files (shards, manifest)

What may be learned from is decided in `selection`: an attempt that failed, was cancelled or is masked is no example and no half
of a pair, and a missing reward is never a zero. The formats are pure: attempts of one group in, rows out.
"""
