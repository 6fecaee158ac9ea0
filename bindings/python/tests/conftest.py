import signal

import pytest

# A shell that starts the tests in the background has them ignore SIGINT, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_torch_thread_and_seed(request):
    """Tests run beside others on two cores, so torch gets one thread; each test starts with the same random seed."""
    if "abi" in request.module.__name__:  # runs without torch
        yield
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
