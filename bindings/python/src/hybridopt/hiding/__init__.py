"""Hides steps behind the forward pass, and copies of gradients behind the backward pass."""
