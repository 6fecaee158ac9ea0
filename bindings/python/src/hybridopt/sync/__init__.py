"""Finds params that other code has written, and updates their masters."""
