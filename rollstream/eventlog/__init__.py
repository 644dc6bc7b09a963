"""The event log on Kafka: producing, reading, provisioning, and durable concurrent consumption (`lanes`).

Delivery is at least once. Nothing here, and nothing built on it, relies on transactions or on idempotent producers.
"""
