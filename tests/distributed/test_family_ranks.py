"""Every family's Megatron ranks under TP=2 and EP=2: names and shapes of all parameters are those of the layout."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megastream.families import FAMILIES, family_of, load_shape
from megastream.layout.mesh import parse_trainer_mesh, trainer_coords
from megastream.layout.synthetic import trainer_names
from megastream.layout.trainer import place_trainer_param
from megastream.trainer import compat
from tests.helpers.family_megatron import build
from tests.helpers.family_models import COMMON, FAMILY_MODELS
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.full

LAYOUTS = {
    "tp2 etp1 ep2": dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    "tp2": dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=2),
    "ep2": dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
}
"""Without sequence parallelism, which megatron's plain norms refuse: nothing is computed here."""
DENSE = {family for family in FAMILIES if not load_shape(FAMILY_MODELS[family].config(family)).num_experts}
PAIRS = [(family, layout) for family in FAMILIES for layout in LAYOUTS if "ep" not in layout or family not in DENSE]
REFUSED = {("gpt_oss", "tp2"): "Bias in Moe is only supported when ETP==1"}
"""What Megatron itself does not build, and what it says."""

Shapes = dict[str, tuple[int, ...]]


def held(
    rank: int, world_size: int, init_method: str, family: str, mesh: dict[str, Any], mtp_layers: int = 0
) -> Shapes:
    """Megatron's own parameters, and the routers' biases, under local numbers."""
    compat.install()
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**mesh, create_gloo_process_groups=False)
    tp = mesh.get("tensor_model_parallel_size", 1)
    experts = {key: size for key, size in mesh.items() if key.startswith("expert_")}
    model = build(family, -(-COMMON["vocab_size"] // tp) * tp, tp, **experts, mtp_num_layers=mtp_layers or None)
    found = {name: tuple(param.shape) for name, param in model.named_parameters()}
    biases = {name: tuple(each.shape) for name, each in model.named_buffers() if name.endswith("router.expert_bias")}
    return found | biases


def planned(family: str, layout: str, rank: int, held: Shapes, mtp_layers: int = 0) -> Shapes:
    """From the layout string and the family's table, under local numbers.

    Of what a rank holds only the rows over all ranks are taken, as layouts take them: they say how far a vocabulary is
    padded, and whether a projection to a latent is cut, which megatron's local spec does.
    """
    shape = replace(load_shape(FAMILY_MODELS[family].config(family)), mtp_layers=mtp_layers)
    mesh = parse_trainer_mesh(layout)
    coords, table = trainer_coords(mesh, rank), family_of(shape)
    first = coords["ep"] * (shape.num_experts // mesh.ep)
    found: Shapes = {}
    for name in trainer_names(table, shape, mesh, coords):
        local = re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) - first), name)
        local = _of_mtp(local, shape.num_layers, "".join(held))
        rows = held.get(local, (0,))[0] * mesh.tp
        found[local] = place_trainer_param(table.trainer_entry(name, shape), coords, rows).shape
    return found


def _of_mtp(name: str, num_layers: int, names: str) -> str:
    """Megatron's name in a layer of multi-token prediction, which it counts from 0; others stay."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.((?:enorm|hnorm|eh_proj|final_layernorm)\.)?(.+)", name)
    if match is None or int(match[1]) < num_layers:
        return name
    inside = "mtp_model_layer." if "mtp_model_layer." in names else "transformer_layer."  # later releases, 0.16
    return f"mtp.layers.{int(match[1]) - num_layers}.{match[2] or inside}{match[3]}"


@pytest.mark.parametrize("family", [family for family in FAMILIES if FAMILIES[family].has_mtp])
def test_layers_of_multi_token_prediction_are_what_the_layout_says(family: str) -> None:
    layout = "tp2 etp1 ep2"
    for rank, found in enumerate(run_ranks(held, 2, family=family, mesh=LAYOUTS[layout], mtp_layers=2)):
        assert len([name for name in found if name.startswith("mtp.layers.1.")]) > 10
        assert found == planned(family, layout, rank, found, mtp_layers=2), rank


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_megatrons_ranks_hold_what_the_layout_says(family: str, layout: str) -> None:
    mesh = LAYOUTS[layout]
    if (family, layout) in REFUSED:
        with pytest.raises(AssertionError, match=REFUSED[family, layout]):
            run_ranks(held, 2, family=family, mesh=mesh)
        return
    for rank, found in enumerate(run_ranks(held, 2, family=family, mesh=mesh)):
        assert len(found) > 20
        assert found == planned(family, layout, rank, found), (family, layout, rank)
        assert found["embedding.word_embeddings.weight"][0] == -(-COMMON["vocab_size"] // (2 if "tp2" in layout else 1))
