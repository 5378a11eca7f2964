"""Which layers a pipeline stage has, enumerated against the functions by which Megatron finds its layers."""

from __future__ import annotations

import importlib
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.layout.mesh import Mesh, parse_trainer_mesh, trainer_chunks
from megastream.layout.stages import pipeline_layout, uneven_stages

pytestmark = pytest.mark.full

Stages = list[tuple[int, ...]]
"""Layers of each (virtual) stage, as a token passes them."""


def ours(num_layers: int, pp: int, vpp: int | None, said: dict[str, Any]) -> Stages | None:
    try:
        stages = uneven_stages(num_layers, pp, vpp or 1, **said)
    except ValueError:
        return None
    mesh = Mesh(pp=pp, vpp=vpp or 1, stages=stages)
    chunks = [trainer_chunks(mesh, num_layers, stage) for stage in range(pp)]
    return [chunks[stage][chunk] for chunk in range(vpp or 1) for stage in range(pp)]


def megatrons(num_layers: int, pp: int, vpp: int | None, said: dict[str, Any]) -> Stages | None:
    """By the two functions with which its model finds its layers; None where they refuse, or leave layers out."""
    num = importlib.import_module("megatron.core.transformer.transformer_block").get_num_layers_to_build
    offset = importlib.import_module("megatron.core.transformer.transformer_layer").get_transformer_layer_offset
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=said["first"],
        num_layers_in_last_pipeline_stage=said["last"],
        account_for_embedding_in_pipeline_split=said["embedding"],
        account_for_loss_in_pipeline_split=said["loss"],
    )
    places = [(chunk if vpp else None, stage) for chunk in range(vpp or 1) for stage in range(pp)]
    try:
        spans = [(offset(config, *place), num(config, *place)) for place in places]
    except AssertionError:
        return None
    found = [tuple(range(start, start + many)) for start, many in spans]
    return found if [layer for stage in found for layer in stage] == list(range(num_layers)) else None


def test_stages_of_megatrons_arguments_equal_megatrons() -> None:
    """Uneven first and last stages, virtual ones, embedding and loss that count as layers; refused where it refuses."""
    found = {"equal": 0, "refused": 0, "empty": 0}
    ends = (None, 1, 2, 4)
    for num_layers, pp, vpp, first, last in product(range(2, 13), (2, 3, 4), (None, 2, 3), ends, ends):
        for embedding, loss in product((False, True), repeat=2):
            if (embedding or loss) and (first or last):
                continue  # its config refuses both at once
            if first and last and vpp and pp == 2:
                continue  # it divides by the number of stages between, 0
            said = {"first": first, "last": last, "embedding": embedding, "loss": loss}
            one, other = ours(num_layers, pp, vpp, said), megatrons(num_layers, pp, vpp, said)
            if one is None and other is not None:
                assert () in other[1:-1], (num_layers, pp, vpp, said)
                found["empty"] += 1  # refused by its config, too
                continue
            assert one == other, (num_layers, pp, vpp, said)
            found["equal" if one else "refused"] += 1
    assert found["equal"] > 300 and found["refused"] > 500 and found["empty"] > 10, found


def test_pipeline_layouts_equal_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split of up to 2 layers a stage over 2 to 4 stages, virtual ones too, and letters that are repeated."""
    module = importlib.import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs, world = module.PipelineParallelLayerLayout, []
    monkeypatch.setattr(module.parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: world[-1])
    compared = 0
    for num in (2, 3, 4):
        for sizes in product(range(3), repeat=num):
            if sum(sizes) == 0 or 0 in sizes[1:-1]:
                continue
            text = f"E{'|'.join('t' * size for size in sizes)}L"
            for pp in [pp for pp in (2, 3, 4) if num % pp == 0]:
                mesh, layout = parse_trainer_mesh(f"pp{pp}({text})"), theirs(text, pp)
                layout.validate_layer_layout(sum(sizes), None)
                world.append(mesh.vpp if mesh.vpp > 1 else None)
                for stage, chunk in product(range(pp), range(mesh.vpp)):
                    expected = layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage)
                    assert list(trainer_chunks(mesh, sum(sizes), stage)[chunk]) == expected, (text, pp)
                    compared += 1
    assert compared > 200 and 2 in world and None in world
    for text in ("Ettt|(tt|)*29,tmL", "E,(t|)*3,(tt|)*2,t*2,L", "E|t*4|(|t)*2|L", "Et|(t,t)*3|t*2mmL"):
        rows = theirs.parse_str_to_list(text)
        counted = tuple(row.count(module.LayerType.decoder) for row in rows)
        if 0 in counted[1:-1]:
            with pytest.raises(ValueError, match="each needs one above 0"):
                pipeline_layout(text)
        else:
            assert pipeline_layout(text) == counted
