"""What any part of the package needs to ask of torch, of callers or of a value."""
