"""The optimizers that users make: torch's classes, with an engine."""
