"""Patches in the forms of other projects, given to those projects' own receivers.

verl's loaders come with the frameworks. vLLM's takes `pip install --no-deps --target FOLDER vllm==0.33.0` and FOLDER in
PYTHONPATH: its one module runs without the rest of vLLM, of which it asks whether embeddings are tied. slime's receiver
is a patch of SGLang that no package has, so that versions are read here as slime's documentation describes them."""

import copy
import importlib.util
import json
import sys
import types
import zlib

import pytest
import torch
from torch import nn

import hybridopt
from hybridopt.changes import wire_forms
from verl_on_cpu import leave_out

leave_out("datasets", "pandas", "fastapi", "uvicorn", "starlette", "starlette.requests", "starlette.responses")


class Follower(nn.Module):
    """An engine's model: it packs two tensors of the checkpoint into one param, as engines do with q, k and v."""

    def __init__(self, model):
        super().__init__()
        self.packed = nn.Parameter(torch.cat([model.first.weight, model.second.weight]).detach().clone())
        self.bias = nn.Parameter(model.first.bias.detach().clone())
        self.norm = nn.Parameter(model.norm.weight.detach().clone())

    def load_weights(self, weights):
        rows = {"first.weight": slice(0, 16), "second.weight": slice(16, 40)}
        names = set()
        for name, tensor in weights:
            names.add(name)
            target = self.packed[rows[name]] if name in rows else {"first.bias": self.bias}.get(name, self.norm)
            target.data.copy_(tensor)
        return names

    def has(self, model):
        pairs = [
            (self.packed[:16], model.first.weight),
            (self.packed[16:], model.second.weight),
            (self.bias, model.first.bias),
            (self.norm, model.norm.weight),
        ]
        return all(own.dtype == its.dtype and torch.equal(own, its) for own, its in pairs)


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(24, 16).bfloat16(), nn.Linear(24, 24, bias=False).bfloat16()
        self.norm = nn.LayerNorm(24, bias=False)  # fp32


def made():
    model = Trainer()
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-4, track_changes=True, threads=1)
    return model, optimizer, Follower(model)


def trained(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def publications(apply):
    """Each publication brings the follower up to date, with whole params first and with few elements later."""
    model, optimizer, follower = made()
    with torch.no_grad():
        for param in follower.parameters():
            param.zero_()
    for publication in range(4):
        patch = optimizer.weight_changes(dense_above=1.0)
        assert all(change.dense for _, change in patch) == (publication == 0)
        apply(follower, patch, model)
        assert follower.has(model)
        patch.acknowledge()
        trained(model, optimizer, publication)
    optimizer.weight_changes()
    assert not follower.has(model)


@pytest.mark.parametrize("flush_bytes", [512 << 20, 64 * 24, 100])
def test_verls_loader_for_sglang_applies_flushes(flush_bytes):
    loader = pytest.importorskip("verl.workers.rollout.sglang_rollout.delta_loader")

    def apply(follower, patch, _):
        for named in wire_forms.verl_flushes(patch, flush_bytes=flush_bytes):
            with torch.no_grad():
                loader.apply_delta(follower, named)

    publications(apply)


def test_verls_loader_refuses_a_flush_that_was_damaged():
    loader = pytest.importorskip("verl.workers.rollout.sglang_rollout.delta_loader")
    model, optimizer, follower = made()
    optimizer.weight_changes().acknowledge()
    trained(model, optimizer, 1)
    [flush, *_] = wire_forms.verl_flushes(optimizer.weight_changes(dense_above=1.0))
    values = dict(flush)["__values__"]
    values[0] += 1
    with pytest.raises(RuntimeError, match="delta checksum mismatch"):
        loader.apply_delta(follower, flush)


@pytest.fixture
def vllms_loader(monkeypatch):
    """vLLM's module checkpoint_weight_patch, from a package of which nothing else is imported."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("vLLM is not installed")
    utils = types.ModuleType("vllm.model_executor.models.utils")
    utils._get_tied_embedding_params = lambda _: {}
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    path = f"{vllm.submodule_search_locations[0]}/model_executor/model_loader/checkpoint_weight_patch.py"
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllms_loader_applies_patches(vllms_loader):
    def apply(follower, patch, _):
        patches = wire_forms.vllm_patches(patch)
        names = vllms_loader.load_checkpoint_weight_patches(follower, patches)
        assert names == {name for name, change in patch if change.values.numel()}
        assert vllms_loader.CheckpointWeightPatch._fields == wire_forms.VllmPatch._fields

    publications(apply)


def test_verls_flushes_for_vllm_become_vllms_patches(vllms_loader, monkeypatch):
    """verl's decoder for vLLM, and then vLLM's loader. The decoder's module imports much of vLLM, which is not there."""
    for name, names in {
        "vllm.config": [],
        "vllm.config.weight_transfer": ["WeightTransferConfig"],
        "vllm.distributed": [],
        "vllm.distributed.weight_transfer": [],
        "vllm.distributed.weight_transfer.base": [
            *("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        ],
        "vllm.model_executor.model_loader": [],
    }.items():
        module = types.ModuleType(name)
        for each in names:
            setattr(module, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.checkpoint_weight_patch", vllms_loader)
    verl = importlib.util.find_spec("verl")
    path = f"{verl.submodule_search_locations[0]}/workers/rollout/vllm_rollout/delta_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("delta_weight_transfer", path)
    decoder = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "delta_weight_transfer", decoder)
    spec.loader.exec_module(decoder)

    def apply(follower, patch, _):
        encodings = set()
        for named in wire_forms.verl_flushes(patch):
            encoding, patches = decoder.decode_delta_payload(named)
            encodings.add(encoding)
            vllms_loader.load_checkpoint_weight_patches(follower, patches, validate_unique_indices=False)
        assert len(encodings) == 1

    publications(apply)


# ------------------------------------------------------------------------------------------- slime


def pulled(engine, folder, version):
    """Applies a version to tensors by name, as slime's docs/en/advanced/delta-weight-sync.md and the code that
    writes versions there (update_weight_from_disk_delta.py) describe it."""
    zstandard = pytest.importorskip("zstandard")
    safetensors = pytest.importorskip("safetensors")
    path = folder / f"weight_v{version:06d}"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    for file in set(index["weight_map"].values()):
        with safetensors.safe_open(path / file, "pt") as opened:
            assert set(opened.keys()) == {name for name, its in index["weight_map"].items() if its == file}
            for name in opened.keys():  # noqa: SIM118
                delta = zstandard.ZstdDecompressor().decompress(opened.get_tensor(name).numpy().tobytes())
                count = int.from_bytes(delta[:4], "little")
                places = torch.frombuffer(bytearray(delta[4 : 4 + 4 * count]), dtype=torch.int32).long()
                content = engine[name].view(-1).view(torch.uint8)
                content[places] = torch.frombuffer(bytearray(delta[4 + 4 * count :]), dtype=torch.uint8)
                assert opened.metadata()[name] == f"{zlib.adler32(content.numpy().tobytes()):08x}"


def test_slimes_versions_bring_a_checkpoint_up_to_date(tmp_path):
    pytest.importorskip("zstandard")
    model, optimizer, _ = made()
    engine = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.weight_changes().acknowledge()
    for version in range(1, 5):
        trained(model, optimizer, version)
        if version == 3:
            optimizer.mark_weights_changed()
        patch = optimizer.weight_changes(dense_above=1.0)
        path = wire_forms.write_slime_version(patch, model, tmp_path, version)
        assert path == str(tmp_path / f"weight_v{version:06d}")
        patch.acknowledge()
        pulled(engine, tmp_path, version)
        assert all(torch.equal(engine[name], param) for name, param in model.named_parameters())
    wire_forms.write_slime_version(optimizer.weight_changes(), model, tmp_path, 5)
    assert [path.name for path in (tmp_path / "weight_v000005").iterdir()] == ["model.safetensors.index.json"]
    pulled(copy.deepcopy(engine), tmp_path, 5)


def test_a_version_of_params_that_have_moved_on_is_refused(tmp_path):
    pytest.importorskip("zstandard")
    model, optimizer, _ = made()
    optimizer.weight_changes().acknowledge()
    trained(model, optimizer, 1)
    patch = optimizer.weight_changes(dense_above=1.0)
    trained(model, optimizer, 2)
    with pytest.raises(ValueError, match="of the model is not as it was when the patch was made"):
        wire_forms.write_slime_version(patch, model, tmp_path, 1)
    assert not list(tmp_path.iterdir())
