"""hybridopt: optimizers whose state lives in host memory, for PyTorch and without it."""
