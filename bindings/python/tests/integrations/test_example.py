"""examples/07_megatron.py on two ranks. Megatron uses the CPU as if it were a GPU (cpu_as_gpu.py)."""

import importlib
import sys
from pathlib import Path

import ranks


def train(rank, world):
    from cpu_as_gpu import cpu_as_gpu

    sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
    example = importlib.import_module("07_megatron")
    with cpu_as_gpu():
        return example.run()


def test_the_example_with_megatron_trains():
    for losses in ranks.run(train, 2):
        assert len(losses) == 20 and sum(losses[-4:]) < 0.5 * sum(losses[:4])
