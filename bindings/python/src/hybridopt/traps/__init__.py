"""Traps on tensors, which call an owner before torch uses the tensor, and the owners that raise."""
