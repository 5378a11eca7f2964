"""Which layers files of ranks hold: as Megatron's own arguments in them say it, uneven and virtual stages too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, write_hf

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT, VPP = "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"
SAID: list[Any] = [
    ("pp2(0,2,1,1) vpp2", {}),
    ("pp2(1,3)", {LAYOUT: None, FIRST: 1}),
    pytest.param("pp3(0,4,0)", {}, marks=pytest.mark.full),
    pytest.param("pp2(1,3)", {LAYOUT: None, LAST: 3}, marks=pytest.mark.full),
    pytest.param("pp3(1,2,1)", {LAYOUT: None, FIRST: 1, LAST: 1}, marks=pytest.mark.full),
    pytest.param("pp3(1,2,1)", {LAYOUT: None, EMBEDDING: True, LOSS: True}, marks=pytest.mark.full),
    pytest.param("pp2(1,1,1,1) vpp2", {LAYOUT: None, FIRST: 2}, marks=pytest.mark.full),
    pytest.param("pp2(1,3)", {LAYOUT: "E,t|t*3,L"}, marks=pytest.mark.full),
    pytest.param("pp2(1,2,1,0) vpp2", {LAYOUT: "Et|t*2|(t|)*1L", VPP: None}, marks=pytest.mark.full),
]
"""The layout that files are written under, and what is changed in their arguments: what Megatron would say instead."""


def say(folder: Path, **changes: Any) -> Path:
    """Changes the arguments in all files of ranks."""
    for path in folder.glob("mp_rank_*/model_optim_rng.pt"):
        stored = torch.load(path, weights_only=False)
        vars(stored["args"]).update(changes)
        torch.save(stored, path)
    return folder


@pytest.mark.parametrize(("layout", "changes"), SAID)
def test_files_say_their_stages(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    source = write_hf(tmp_path / "hf", layers=4, experts=4)
    ranks = say(converted(source, tmp_path / "ranks", "mp_rank", to_layout=layout), **changes)
    back = converted(ranks, tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({LAYOUT: None, FIRST: 2, LAST: 1}, "1 of 4 layers do not divide by the 0 of 2 stages that share them"),
        ({LAYOUT: [["embedding"], ["loss"]]}, "its pipeline layout is no text"),
        ({LAYOUT: None, FIRST: "two"}, "give the layers of each stage with --from-layout"),
        ({LAYOUT: "Et|mtttL"}, "m only beside L"),
        ({LAYOUT: "Ettt|tL"}, "beyond the 1 layers of this stage"),
    ],
)
def test_stages_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Also other stages than the files have."""
    source = write_hf(tmp_path / "hf", layers=4, experts=2, top_k=1)
    ranks = say(converted(source, tmp_path / "ranks", "mp_rank", to_layout="pp2(1,3)"), **changes)
    with pytest.raises(ConvertError, match=words) as caught:
        converted(ranks, tmp_path / "back")
    assert "\n" not in str(caught.value) and str(ranks) in str(caught.value)
    assert not (tmp_path / "back").exists()
