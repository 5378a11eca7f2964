"""All pairs of the four forms, also of one form to itself under another layout: every element, by other readers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megastream.layout.mesh import parse_engine_mesh, parse_trainer_mesh
from tests.helpers.convert_models import converted, tensors_of
from tests.helpers.convert_reader import differing_dist, differing_hf, differing_ranks, differing_state, write_model
from tests.helpers.layout_reference import Model
from tests.helpers.reference_families import REFERENCES, TINY

TRAINERS = {"tp2 etp1 ep2 pp2 vpp2": (1, 1, 1, 1), "ep4 pp3(2,1,1)": (2, 1, 1)}
DENSE_TRAINERS = {"tp2 pp2 vpp2": (1, 1, 1, 1), "pp3(2,1,1)": (2, 1, 1)}
"""Of the source, and of the target."""
ENGINES = {"tp2 ep2 pp2": (2, 2), "tp4 pp3(1,2,1)": (1, 2, 1)}
DENSE_ENGINES = {"tp2 pp2": (2, 2), "tp4 pp3(1,2,1)": (1, 2, 1)}
Differing = Callable[[Path], list[str]]


def four_layers(family: str) -> Model:
    reference = REFERENCES[family]
    return Model(reference.config(**{**TINY, **reference.small, "num_hidden_layers": 4}))


def forms(model: Model, which: int) -> dict[str, tuple[str | None, Differing]]:
    """Form -> its layout, and its reader; `which` of the two layouts it has."""
    trainers, engines = (TRAINERS, ENGINES) if model.num_experts else (DENSE_TRAINERS, DENSE_ENGINES)
    (trainer, stages), (engine, engine_stages) = (list(each.items())[which] for each in (trainers, engines))
    return {
        "hf": (None, partial(differing_hf, model=model)),
        "torch_dist": (None, partial(differing_dist, model=model)),
        "mp_rank": (trainer, partial(differing_ranks, model=model, mesh=parse_trainer_mesh(trainer), sizes=stages)),
        "sharded_state": (
            engine,
            partial(differing_state, model=model, mesh=parse_engine_mesh(engine), sizes=engine_stages),
        ),
    }


OTHERS = ("qwen2_moe", "mixtral", "glm4_moe", "llama", "gpt_oss")


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_all_pairs_of_forms(tmp_path: Path, family: str) -> None:
    """hf, torch_dist and both forms of ranks from each of the four, ranks under another layout than they came from."""
    model = four_layers(family)
    source = write_model(tmp_path / "source", model)
    sources = {
        form: converted(source, tmp_path / form, form, to_layout=layout, max_file_bytes=20_000)
        for form, (layout, _) in forms(model, 0).items()
    }
    for form, (_, differing) in forms(model, 0).items():
        assert differing(sources[form]) == [], form
    for (form, folder), (to, (layout, differing)) in product(sources.items(), forms(model, 1).items()):
        target = converted(folder, tmp_path / f"{form} to {to}", to, to_layout=layout)
        assert differing(target) == [], (form, to)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Its first two rows in each other's place."""
    return tensor[torch.tensor([1, 0, *range(2, len(tensor))])]


def test_the_readers_see_two_rows_swapped(tmp_path: Path) -> None:
    model = four_layers("qwen3_moe")
    source = write_model(tmp_path / "source", model)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2")
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp2")

    tensors = tensors_of(source)
    name = "model.layers.3.self_attn.q_proj.weight"
    save_file(tensors | {name: swapped(tensors[name])}, source / "model.safetensors")
    assert differing_hf(source, model) == [name]

    path = state / "model-rank-1-part-0.safetensors"
    tensors = load_file(path)
    name = "model.layers.3.self_attn.qkv_proj.weight"
    save_file(tensors | {name: swapped(tensors[name])}, path)
    assert differing_state(state, model, parse_engine_mesh("tp2"), (4,)) == [f"rank-1 {name}"]

    path = ranks / "mp_rank_01_001" / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    name = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"
    stored["model"][name] = swapped(stored["model"][name])
    torch.save(stored, path)
    mesh = parse_trainer_mesh("tp2 etp1 ep2")
    found = differing_ranks(ranks, model, mesh, (4,))
    assert found == [f"mp_rank_01_001 {name.replace('experts.1', 'experts.3')}"]
