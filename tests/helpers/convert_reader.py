"""Reads each form with torch's or safetensors' own reader, and holds it against arrays that are cut by hand.

Where an element belongs is said by `layout_reference` alone. Of ours are the numbers of ranks, which are tested against
Megatron's and vLLM's own elsewhere, and the names of vLLM's saved state.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from megastream.layout.mesh import Mesh, engine_coords, trainer_coords
from tests.helpers.convert_models import tensors_of
from tests.helpers.layout_reference import Model, megatron_rank, vllm_rank

PADDED_ROWS = 128
"""Megatron's scripts pad the vocabulary to a multiple of this times tp."""
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine's names."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


def write_model(folder: Path, model: Model) -> Path:
    """The tagged weights in Hugging Face's form, fp32."""
    folder.mkdir()
    save_file({name: torch.from_numpy(array) for name, array in model.tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.raw))
    return folder


def split(num_layers: int, sizes: tuple[int, ...]) -> list[list[int]]:
    """Consecutive layers of each stage, as a token passes them."""
    ends = list(accumulate(sizes))
    assert ends[-1] == num_layers
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def differing_hf(folder: Path, model: Model) -> list[str]:
    return _differing(tensors_of(folder), model.tensors)


def differing_ranks(folder: Path, model: Model, mesh: Mesh, sizes: tuple[int, ...]) -> list[str]:
    """`sizes`: layers of every (virtual) stage in the order of the pipeline."""
    stages, wrong = split(model.raw["num_hidden_layers"], sizes), []
    for rank in range(mesh.world_size):
        at = trainer_coords(mesh, rank)
        chunks = [stages[chunk * mesh.pp + at["pp"]] for chunk in range(mesh.vpp)]
        layers = [layer for chunk in chunks for layer in chunk]
        expected = megatron_rank(model, at, layers, te=False, pad=PADDED_ROWS * mesh.tp, swap=False)
        name = f"mp_rank_{at['tp']:02}" + (f"_{at['pp']:03}" if mesh.pp > 1 else "")
        name += f"_{at['ep']:03}" if mesh.ep > 1 else ""
        stored = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
        first = at["ep"] * (model.num_experts // mesh.ep)
        held: dict[str, torch.Tensor] = {}
        for number, chunk in enumerate(chunks):
            for local, value in stored[f"model{number}" if mesh.vpp > 1 else "model"].items():
                held[_global(local, chunk, first)] = value
        wrong += [f"{name} {each}" for each in _differing(held, expected)]
    return wrong


def differing_state(folder: Path, model: Model, mesh: Mesh, sizes: tuple[int, ...]) -> list[str]:
    stages, wrong = split(model.raw["num_hidden_layers"], sizes), []
    for rank in range(mesh.world_size):
        at = engine_coords(mesh, rank)
        expected, _ = vllm_rank(model, at, mesh.ep > 1, stages)
        place = f"pp-{at['pp']}-tp-{at['tp']}" if mesh.pp > 1 else f"rank-{at['tp']}"
        held: dict[str, torch.Tensor] = {}
        for path in folder.glob(f"model-{place}-part-*.safetensors"):
            held |= {model.family.engine_name(name): value for name, value in load_file(path).items()}
        held = {name: value for name, value in held.items() if not name.endswith("_scale")}
        wrong += [f"{place} {each}" for each in _differing(held, expected)]
    return wrong


def differing_dist(folder: Path, model: Model) -> list[str]:
    """Each parameter as on a lone rank, gate and up apart, norms under the names of both specs."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    stored: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if "_extra_state" not in name
    }
    dcp.load(stored, checkpoint_id=folder, no_dist=True)
    layers = list(range(model.raw["num_hidden_layers"]))
    expected: dict[str, np.ndarray] = {}
    for name, array in megatron_rank(model, trainer_coords(Mesh(), 0), layers, te=False, pad=1, swap=False).items():
        name = name.replace(".local_experts.", ".experts.")
        halves = np.split(array, 2) if "linear_fc1." in name else []
        expected |= dict(zip((f"{name}_w", f"{name}_v"), halves, strict=True)) if halves else {name: array}
        expected |= {name.replace(norm, fused): array for norm, fused in _FUSED_NORMS.items() if norm in name}
    return _differing(stored, expected)


def _global(name: str, layers: list[int], first_expert: int) -> str:
    name = _LAYER.sub(lambda match: str(layers[int(match[0])]), name)
    return _EXPERT.sub(lambda match: str(first_expert + int(match[0])), name)


def _differing(held: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> list[str]:
    """Names on one side only, or with other values; padding (NaN in `expected`) is 0 in files."""
    odd = sorted(held.keys() ^ expected.keys())
    wrong = [
        name
        for name in held.keys() & expected.keys()
        if not np.array_equal(held[name].numpy(), np.nan_to_num(expected[name], nan=0.0))
    ]
    return odd + sorted(wrong)
