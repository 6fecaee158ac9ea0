"""The state of params in the library's memory, and as optimizer.state shows it."""
