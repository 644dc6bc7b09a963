"""What plug-ins are tested with: conformance suites to inherit, and stand-ins for what a test cannot have."""
