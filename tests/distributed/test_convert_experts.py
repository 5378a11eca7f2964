"""Megatron's own models of families that `megastream train` does not build, and its GroupedMLP: what their ranks save
is read, and what is converted they load.

Expected parameters are cut by hand from tagged tensors (`layout_reference`, `grouped_experts`); ranks save and load
with megatron's own `dist_checkpointing`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.layout.mesh import Mesh, parse_trainer_mesh, trainer_coords
from megastream.trainer import compat, compat_checkpoint
from tests.helpers.convert_models import converted, difference
from tests.helpers.convert_reader import differing_hf, write_model
from tests.helpers.family_megatron import build
from tests.helpers.family_models import FAMILY_MODELS
from tests.helpers.grouped_experts import with_grouped
from tests.helpers.layout_reference import Model, megatron_rank
from tests.helpers.ranks import run_ranks

VOCAB = 102
LEGACY = dict(moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True)
CASES = [
    pytest.param("qwen3_moe", "ep2", True, id="grouped ep2", marks=pytest.mark.full),
    pytest.param("glm4_moe", "tp2 ep2 etp2", True, id="grouped tp2 ep2 etp2", marks=pytest.mark.full),
    pytest.param("gpt_oss", "tp2 ep2 etp1", False, id="gpt_oss", marks=pytest.mark.full),
    pytest.param("deepseek_v3", "tp2 ep2 etp1", False, id="deepseek_v3", marks=pytest.mark.full),
]
"""Megatron takes biases of experts only where ETP is 1."""


def _stand_in() -> None:
    """For the CUDA package that GroupedMLP asks for when it is made; nothing is computed here."""
    from megatron.core.transformer.moe import grouped_gemm_util

    grouped_gemm_util.grouped_gemm = ModuleType("grouped_gemm")


def _expected(raw: dict[str, Any], mesh: Mesh, rank: int, grouped: bool) -> dict[str, torch.Tensor]:
    """This rank's parameters under its own numbers, by hand."""
    model, at = Model(raw), trainer_coords(mesh, rank)
    held = megatron_rank(model, at, list(range(raw["num_hidden_layers"])), te=False, pad=mesh.tp, swap=False)
    first = at["ep"] * (model.num_experts // mesh.ep)
    params = {
        re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) - first), name): torch.tensor(array)
        for name, array in held.items()
    }
    return with_grouped(params) if grouped else params


def _save(model: Any, at: dict[str, int], folder: Path) -> None:
    """As megatron does: `torch_dist` with keys of both kinds, and this rank's file."""
    for kind, metadata in (("singleton", {"singleton_local_shards": True}), ("stacked", {})):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        planned = compat_checkpoint.plan_save(
            {"model": model.sharded_state_dict(metadata=dict(metadata))}, folder / kind
        )
        planned.write()
        planned.publish_index()
    name = f"mp_rank_{at['tp']:02}" + (f"_{at['ep']:03}" if at["ep_size"] > 1 else "")
    path = folder / "ranks" / name / "model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "checkpoint_version": 3.0, "iteration": 1}, path)


def _body(
    rank: int, world_size: int, init_method: str, family: str, layout: str, grouped: bool, hf: Path, dist: Path
) -> dict[str, Any]:
    compat.install()
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    from megatron.core import dist_checkpointing, parallel_state

    mesh = parse_trainer_mesh(layout)
    experts = dict(expert_model_parallel_size=mesh.ep, expert_tensor_parallel_size=mesh.etp)
    parallel_state.initialize_model_parallel(mesh.tp, **experts, create_gloo_process_groups=False)
    if grouped:
        _stand_in()
    model = build(family, VOCAB, mesh.tp, **experts, **(LEGACY if grouped else {}))
    held = dict(model.named_parameters())
    held |= {name: each for name, each in model.named_buffers() if name.endswith("router.expert_bias")}
    expected = _expected(json.loads((hf / "config.json").read_text()), mesh, rank, grouped)
    found = {"odd": sorted(held.keys() ^ expected.keys()), "num": len(held)}
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(expected[name])
    _save(model, trainer_coords(mesh, rank), hf.parent / "stock")

    for tensor in held.values():
        tensor.data.fill_(-9.0)
    metadata = dist_checkpointing.load_content_metadata(str(dist))
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(dist))
    model.load_state_dict(loaded["model"])
    return found | {"loaded": [name for name, tensor in held.items() if not tensor.equal(expected[name])]}


@pytest.mark.parametrize(("family", "layout", "grouped"), CASES)
def test_megatron_loads_it_and_what_megatron_saves_is_read(
    tmp_path: Path, family: str, layout: str, grouped: bool
) -> None:
    raw = {**FAMILY_MODELS[family].config(family), "vocab_size": VOCAB, "torch_dtype": "float32"}
    model, mesh = Model(raw), parse_trainer_mesh(layout)
    hf = write_model(tmp_path / "hf", model)
    dist = converted(hf, tmp_path / "dist", "torch_dist")
    job = dict(family=family, layout=layout, grouped=grouped, hf=hf, dist=dist)
    for found in run_ranks(_body, mesh.world_size, timeout_s=100, **job):
        assert found["num"] > 20 and (found["odd"], found["loaded"]) == ([], [])
    stock, num = tmp_path / "stock", sum(name.endswith(".mlp.gate.weight") for name in model.tensors)
    num *= mesh.ep * mesh.etp if grouped else 0
    # weight1 and weight2; among boxes gate and up are apart.
    for kind, num_grouped in {"ranks": 2 * num, "stacked": 3 * num, "singleton": 0}.items():
        options = Options(config=hf, from_layout=layout if kind == "ranks" else None)
        done = convert(stock / kind, tmp_path / f"from-{kind}", options, lambda done, total: None)
        assert differing_hf(tmp_path / f"from-{kind}", model) == []
        assert done.grouped == num_grouped, kind
    assert difference(dist, stock / "stacked") is None
