"""Tensors that tell an owner before torch uses them, and the owners that refuse."""
