import pytest


@pytest.fixture(autouse=True)
def one_torch_thread_and_seed(request):
    """Tests share two cores with others, and start from the same numbers."""
    if "abi" in request.module.__name__:  # runs without torch
        yield
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
