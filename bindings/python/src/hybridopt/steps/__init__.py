"""Steps that are queued, under way or done, and their reports."""
