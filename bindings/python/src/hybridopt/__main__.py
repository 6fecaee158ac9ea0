"""python -m hybridopt: what is installed here, and what a model's optimizer state would take."""

from __future__ import annotations

import argparse
import math

from . import abi

ALGORITHMS = {
    "adamw": (abi.OFFLOAD_ADAMW, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "adam": (abi.OFFLOAD_ADAM, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "sgd": (abi.OFFLOAD_SGD, {"momentum": 0.9}),
    "lion": (abi.OFFLOAD_LION, {"beta1": 0.9, "beta2": 0.99}),
    "signum": (abi.OFFLOAD_SIGNUM, {"momentum": 0.9}),
    "adagrad": (abi.OFFLOAD_ADAGRAD, {"eps": 1e-10}),
}
DTYPES = {
    "float32": (abi.OFFLOAD_FP32, 4),
    "bfloat16": (abi.OFFLOAD_BF16, 2),
    "float16": (abi.OFFLOAD_FP16, 2),
}
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Two models that are small enough for a simulated device and large enough to fill its staging ring.
SMALL, LARGE = 8 << 20, 16 << 20


def info() -> None:
    print(abi.build_info())
    print(f"library   {abi.library()._name}")
    print(f"ABI       {abi.abi_version() // 1000}.{abi.abi_version() % 1000}")
    with abi.Context() as context:
        it = context.info()
        print(f"kernels   {it.isa.decode()}")
        print(f"threads   {it.threads} on {it.nodes} NUMA node(s), {it.cpus_allowed} CPUs allowed")
        if it.notes:
            print(f"notes     {it.notes.decode()}")
    try:
        with abi.Context(device_kind=abi.OFFLOAD_DEVICE_CUDA) as context:
            it = context.info()
            free, all_bytes = it.device_memory_free_bytes, it.device_memory_bytes
            print(f"CUDA      {it.device_name.decode()}, {gigabytes(free)} of {gigabytes(all_bytes)} free")
    except abi.HybridoptError as error:
        print(f"CUDA      none: {error}")


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def small_plan(
    elements: int, arguments: argparse.Namespace, offload_fraction: float
) -> abi.offload_plan_t:
    """A real plan, of the simulated device: nothing is committed."""
    algorithm, hyperparameters = ALGORITHMS[arguments.algorithm]
    dtype, bytes_each = DTYPES[arguments.dtype]
    with abi.Context(
        device_kind=abi.OFFLOAD_DEVICE_SIM, sim_memory_bytes=LARGE * (bytes_each + 1)
    ) as context, abi.Optimizer(
        context, algorithm=algorithm, device_fraction=1.0 - offload_fraction
    ) as optimizer:
        param = abi.offload_param_t(
            group=optimizer.add_group(lr=1.0, **hyperparameters),
            dtype=dtype,
            grad_dtype=dtype,
            name=b"all",
            data=context.alloc(elements * bytes_each),
            count=elements,
        )
        optimizer.add_params([param])
        return optimizer.plan()


def count_of(text: str) -> int:
    """A number of parameters as people write it: 7e9, 7B, 350M."""
    factor = UNITS.get(text[-1:].upper(), 1)
    try:
        count = float(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        count = math.nan
    if not 1 <= count < 1e18:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected how many parameters, at least 1, as 7e9, 7B or 350M"
        )
    return int(count)


def fraction_of(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected 0 (all on the device) to 1 (on the host)")
    return fraction


def plan(arguments: argparse.Namespace) -> None:
    elements = arguments.elements
    fraction = arguments.offload_fraction
    staging = small_plan(LARGE, arguments, float(fraction > 0)).staging_bytes  # with a full ring
    # Each share by itself: what it takes is then a constant and a slope.
    shares = [(elements * part, where) for part, where in ((fraction, 1.0), (1 - fraction, 0.0))]
    plans = [
        (count, small_plan(SMALL, arguments, where), small_plan(LARGE, arguments, where))
        for count, where in shares
        if count > 0
    ]
    for _, *both in plans:
        for each in both:
            each.host_bytes -= each.staging_bytes

    def size(of: str) -> float:
        """Every size but that of the ring."""
        total = 0.0
        for count, small, large in plans:
            slope = (getattr(large, of) - getattr(small, of)) / (LARGE - SMALL)
            total += max(0.0, getattr(large, of) + slope * (count - LARGE))
        return total

    print(
        f"{arguments.algorithm} over {elements:,} elements of {arguments.dtype}, "
        f"{fraction:.0%} of the state on the host"
    )
    host = size("host_bytes") + staging
    pinned = staging + size("pinned_state_bytes")
    print(f"host      {gigabytes(host)}, of it {gigabytes(pinned)} pinned")
    ring = size("device_ring_bytes")
    print(f"device    {gigabytes(size('device_bytes'))}, of it {gigabytes(ring)} for state that streams")
    down, up = size("grads_down_bytes"), size("params_up_bytes")
    print(f"per step  {gigabytes(down)} down, {gigabytes(up)} up, if CPU threads update the host's share")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridopt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="the library, this machine and its devices")
    planner = commands.add_parser("plan", help="bytes that optimizer state takes beside a GPU")
    planner.add_argument("elements", type=count_of, help="how many parameters: 7e9, 7B, 350M")
    planner.add_argument("--algorithm", choices=ALGORITHMS, default="adamw")
    planner.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    planner.add_argument("--offload-fraction", type=fraction_of, default=1.0)
    arguments = parser.parse_args(argv)
    if arguments.command == "info":
        info()
    else:
        plan(arguments)


if __name__ == "__main__":
    main()
