"""What two or more of the workers need: settings, sealing, models, environments, the event log, the store, the CLI."""
