"""Keyword arguments, and the placement and the contexts that follow from them."""
