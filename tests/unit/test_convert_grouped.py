"""Files of ranks whose experts are GroupedMLP's: read, complete or refused, and said in one line.

Files that real ranks with this class save: `tests/distributed/test_convert_experts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.convert import grouped
from megastream.convert.model import find_model
from megastream.convert.types import ConvertError
from megastream.layout.mesh import Mesh, trainer_coords
from megastream.layout.shard import RankLayout, TensorSpec
from tests.helpers.convert_models import converted, difference, tensors_of, write_family, write_hf
from tests.helpers.grouped_experts import with_grouped

PREFIX = "decoder.layers.1.mlp.experts."
WEIGHT1, WEIGHT2 = f"{PREFIX}weight1", f"{PREFIX}weight2"


def grouped_ranks(source: Path, target: Path, layout: str) -> Path:
    """The files that our own form has, with the experts of each packed."""
    converted(source, target, "mp_rank", to_layout=layout)
    for path in target.glob("mp_rank_*/model_optim_rng.pt"):
        stored = torch.load(path, weights_only=False)
        for key in [key for key in stored if key.startswith("model")]:
            stored[key] = with_grouped(stored[key])
        torch.save(stored, path)
    return target


def edit(folder: Path, change: Any) -> None:
    path = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    change(stored["model"])
    torch.save(stored, path)


@pytest.mark.parametrize(
    ("family", "sizes", "layout"),
    [
        ("qwen3_moe", {"layers": 2, "experts": 4}, "tp2 etp2 ep2"),
        pytest.param("qwen2_moe", {"layers": 2, "experts": 4}, "tp2 etp1 ep2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"layers": 4, "experts": 4}, "pp2 vpp2 ep4", marks=pytest.mark.full),
        pytest.param(
            "glm4_moe", {"layers": 2, "experts": 4, "mtp_layers": 2}, "tp2 etp2 ep2 pp2", marks=pytest.mark.full
        ),
    ],
)
def test_they_are_read(tmp_path: Path, family: str, sizes: dict[str, int], layout: str) -> None:
    source = write_hf(tmp_path / "hf", family, **sizes)
    ranks = grouped_ranks(source, tmp_path / "ranks", layout)
    back = converted(ranks, tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for to, to_layout in (("torch_dist", None), ("mp_rank", "ep2"), ("sharded_state", "tp2")):
        assert difference(converted(ranks, tmp_path / to, to, to_layout=to_layout), source) is None
    assert difference(ranks, source) is None and difference(source, ranks) is None


def test_one_line_says_what_they_are(tmp_path: Path) -> None:
    """And nothing of the kind is said of other experts."""
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    ranks = grouped_ranks(source, tmp_path / "ranks", "tp2 etp1 ep2")
    others = converted(ranks, tmp_path / "others", "mp_rank", to_layout="tp2 etp1 ep2")
    said = f"{ranks} has its experts as Megatron's GroupedMLP stores them: 8 tensors, each with all experts of a rank\n"
    for folder, lines in ((ranks, 1), (others, 0)):
        done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / f"from-{folder.name}")])
        assert done.exit_code == 0 and done.output.count("GroupedMLP") == lines
        assert done.output.count(said) == lines


def test_an_element_that_differs_is_named(tmp_path: Path) -> None:
    """Of the last expert of the last rank: input 5 of its gate's row 3, of its up's row 7, and of its down's row 11."""
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    ranks = grouped_ranks(source, tmp_path / "ranks", "tp2 etp2 ep2")
    edit(ranks, lambda model: model[WEIGHT1].view(2, 48, 20)[1, 5, 3].fill_(99))
    name = "model.layers.1.mlp.experts.3."
    assert f"{name}gate_proj.weight[13, 5] is 99" in str(difference(ranks, source))
    fresh = tensors_of(source)[f"{name}gate_proj.weight"][13, 5]
    edit(ranks, lambda model: model[WEIGHT1].view(2, 48, 20)[1, 5, 3].copy_(fresh))
    assert difference(ranks, source) is None
    edit(ranks, lambda model: model[WEIGHT1].view(2, 48, 20)[1, 5, 17].fill_(99))
    edit(ranks, lambda model: model[WEIGHT2].view(2, 10, 48)[1, 5, 11].fill_(98))
    found = tensors_of(converted(ranks, tmp_path / "back"))
    assert found[f"{name}up_proj.weight"].eq(99).nonzero().tolist() == [[17, 5]]
    assert found[f"{name}down_proj.weight"].eq(98).nonzero().tolist() == [[11, 15]]


FAULTS: dict[str, tuple[Any, str]] = {
    "one is missing": (lambda model: model.pop(WEIGHT2), r"lacks model.layers.1.mlp.experts.2.down_proj.weight, "),
    "experts of another rank": (
        lambda model: model.update({WEIGHT1: model[WEIGHT1][:, :40].contiguous()}),
        rf"{WEIGHT1} has shape \(48, 40\); 2 experts of config.json have \(48, 80\) in GroupedMLP",
    ),
    "another width": (
        lambda model: model.update({WEIGHT2: model[WEIGHT2][:, :40].contiguous()}),
        rf"{WEIGHT2} has shape \(40, 40\); 2 experts of config.json have \(40, 48\) in GroupedMLP",
    ),
    "both forms, and one of them differs": (
        lambda model: model.update({f"{PREFIX}local_experts.1.linear_fc2.weight": torch.ones(48, 20).bfloat16()}),
        r"experts.3.down_proj.weight\[0, 0\] is .* copies of one weight must be equal",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_those_that_are_unfit_are_refused(tmp_path: Path, fault: str) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    ranks = grouped_ranks(source, tmp_path / "ranks", "tp2 etp1 ep2")
    change, words = FAULTS[fault]
    edit(ranks, change)
    with pytest.raises(ConvertError, match=words) as caught:
        converted(ranks, tmp_path / "out")
    assert "\n" not in str(caught.value) and str(ranks) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_experts_has_none(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "qwen3")
    nothing = RankLayout("trainer", 0, 1, {}, (), (), ())
    param = TensorSpec(WEIGHT1, (48, 80), "bfloat16")
    with pytest.raises(ValueError, match=f"{WEIGHT1}: config.json says no experts"):
        grouped.with_grouped(nothing, [param], trainer_coords(Mesh(), 0), find_model(source, None))
