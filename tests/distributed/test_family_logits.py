"""Every family's Megatron model, filled through our trainer layout, computes what `transformers` computes (fp32)."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from megastream.families import FAMILIES, load_shape
from tests.helpers.family_megatron import megatron_logits
from tests.helpers.family_models import FAMILY_MODELS, write_transformers
from tests.helpers.ranks import run_ranks

HEART = "mixtral"


def test_every_family_has_a_model() -> None:
    assert set(FAMILY_MODELS) == set(FAMILIES)


@pytest.mark.parametrize("family", [HEART, *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES if f != HEART)])
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """And differ as soon as two tensors of one shape are exchanged."""
    theirs = write_transformers(family, tmp_path)
    job = dict(family=family, folder=str(tmp_path))
    (ours,) = run_ranks(megatron_logits, 1, **job)
    assert float((torch.from_numpy(ours) - theirs).abs().max()) < 1e-5
    (wrong,) = run_ranks(megatron_logits, 1, **job, swapped=_two_alike(tmp_path))
    assert float((torch.from_numpy(wrong) - theirs).abs().max()) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_logits_of_two_tensor_parallel_ranks_equal_transformers(family: str, tmp_path: Path) -> None:
    """Where Megatron cuts a gated delta net, and a gated attention: each rank has what its code takes for q, k, v...

    Sums are in another order, and the norm behind a delta net makes more of it where its input is small (2e-5 seen).
    """
    theirs = write_transformers(family, tmp_path, vocab_size=102)
    for ours in run_ranks(megatron_logits, 2, family=family, folder=str(tmp_path)):
        assert float((torch.from_numpy(ours) - theirs).abs().max()) < 1e-4


def _two_alike(folder: Path) -> tuple[str, str]:
    """Two matrices of one shape in the first layer."""
    shape = load_shape(folder)
    specs = [s for s in FAMILIES[shape.family].tensors(shape) if ".layers.0." in s.name and len(s.shape) > 1]
    return next((one.name, two.name) for one, two in combinations(specs, 2) if one.shape == two.shape)
