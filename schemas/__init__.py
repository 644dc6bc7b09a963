"""The event contracts: what stands in the log.

Every event is self-contained JSON with a literal `kind`. Nothing here does I/O, and nothing here knows Kafka.
"""
