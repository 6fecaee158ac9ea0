"""Changes of weights: patches that bring a second copy of a model up to date, in memory and in files."""
