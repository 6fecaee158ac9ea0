"""Makes NeMo-RL's policy workers importable without its packages for GPUs, data sets and servers, and makes one with
the optimizer that a configuration names. Its sources are expected on PYTHONPATH. Not a test itself."""

import importlib
import importlib.util
import pathlib
import re
import sys
import time
from unittest import mock

import torch

from verl_on_cpu import leave_out

WORKERS = "nemo_rl.models.policy.workers"
DOCS = (
    (pathlib.Path(__file__).parents[4] / "docs" / "FRAMEWORKS.md").read_text().partition("\n## NeMo-RL\n")[2]
)
LEFT_OUT = ("datasets", "fastapi", "nemo_rl.utils.logger", "pynvml", "ray", "ray.cloudpickle", "ray.exceptions",
            "ray.util", "ray.util.placement_group", "ray.util.queue", "ray.util.scheduling_strategies", "tensordict",
            "uvicorn", "zmq")  # fmt: skip
# nemo_automodel, with which the newer worker makes its model, imports these.
OF_AUTOMODEL = ("megatron_fsdp", "torchao", "torchao.float8", "torchao.quantization", "torchao.quantization.qat",
                "torchao.quantization.qat.linear")  # fmt: skip


def is_given():
    """Whether NeMo-RL's sources can be imported. What PyPI has by this name is empty."""
    spec = importlib.util.find_spec("nemo_rl")
    folder = pathlib.Path((spec and spec.origin) or "nowhere").parent
    return (folder / "models/policy/workers/dtensor_policy_worker.py").exists()


def worker_module(name, is_changed=False):
    """A module of NeMo-RL's workers, as it is, or with the lines that docs/FRAMEWORKS.md shows. Ray's actors are plain
    classes there. A process can have either the older worker or the newer one."""
    leave_out(*LEFT_OUT)
    if name.endswith("_v2"):
        leave_out(*OF_AUTOMODEL)
    else:
        sys.modules.setdefault("nemo_automodel", None)  # as where it is not installed

    def remote(*args, **_):
        return args[0] if args else lambda cls: cls

    with mock.patch("ray.remote", remote):
        module = importlib.import_module(f"{WORKERS}.{name}")
        return changed(module) if is_changed else module


def block(language):
    """The first block of code in a language that docs/FRAMEWORKS.md has for NeMo-RL."""
    return re.search(rf"^```{language}\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)[1]


def changed(module):
    lines = block("diff").splitlines(keepends=True)
    removed, added = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
    source = pathlib.Path(module.__file__).read_text()
    assert source.count(removed) == 1
    result = importlib.util.module_from_spec(module.__spec__)
    exec(compile(source.replace(removed, added), module.__file__, "exec"), result.__dict__)
    return result


def configuration(model, optimizer, batch, micro_batch):
    """A policy's configuration with NeMo-RL's own schedule; `optimizer` is the part of that name."""
    schedulers = "torch.optim.lr_scheduler"
    return {
        "model_name": model,
        "optimizer": optimizer,
        "scheduler": [
            {
                "name": f"{schedulers}.LinearLR",
                "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 3},
            },
            {"name": f"{schedulers}.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}},
            {"milestones": [3]},
        ],
        "precision": "bfloat16",
        "tokenizer": {},
        "generation": {"colocated": {"enabled": True}, "top_k": None, "top_p": 1.0, "temperature": 1.0},
        "max_grad_norm": 1.0,
        "train_global_batch_size": batch,
        "train_micro_batch_size": micro_batch,
        "logprob_batch_size": micro_batch,
        "offload_optimizer_for_logprob": True,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False},
        "dtensor_cfg": {
            "cpu_offload": False,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "custom_parallel_plan": None,
        },
    }


def made(worker_class, config, has_reference, **saved):
    """A worker in a process that has its group already."""
    tokenizer = mock.MagicMock(pad_token_id=0)
    setup = sys.modules.get("nemo_rl.models.automodel.setup", mock.MagicMock())  # the newer worker's
    with (
        mock.patch("ray.get_gpu_ids", lambda: [0]),
        mock.patch("torch.distributed.init_process_group", lambda **_: None),
        mock.patch.object(setup, "get_tokenizer", lambda *_, **__: tokenizer),
    ):
        worker = worker_class(config, tokenizer=tokenizer, init_reference_model=has_reference, **saved)
    worker.model.config._attn_implementation = "eager"
    # A thread of gloo may still hold buffers that were broadcast. The worker cannot swap them then.
    for _ in range(1000):
        if all(buffer._use_count() == 1 for buffer in worker.model.buffers()):
            break
        time.sleep(0.001)
    return worker


def batch_of(tokens):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    count, length = tokens.shape
    return BatchedDataDict(
        input_ids=tokens,
        input_lengths=torch.full((count,), length),
        token_mask=torch.ones(count, length),
        sample_mask=torch.ones(count),
    )


def loss_function():
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

    return NLLLossFn()
