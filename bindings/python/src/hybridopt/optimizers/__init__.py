"""The optimizers of users: torch's classes outside, an engine inside."""
