"""`verify` of a folder in fp8: within half a step of one that is not, and exactly where both are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.convert.fp8 import half_steps
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, difference, tensors_of, write_family
from tests.helpers.fp8_reference import bits, slow_fp8, slow_plain

SIZES = {"hidden_size": 200, "moe_intermediate_size": 130, "head_dim": 50, "num_hidden_layers": 2}
NAME = "model.layers.1.mlp.experts.3.gate_proj.weight"
SCALE = f"{NAME}_scale_inv"
Tensors = dict[str, torch.Tensor]
Both = tuple[Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same weights in bf16 and in fp8."""
    folder = tmp_path_factory.mktemp("made")
    converted(write_family(folder / "hf", "qwen2_moe", **SIZES), folder / "fp8", dtype="fp8-block128")
    return folder


@pytest.fixture
def both(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies that may be changed."""
    return copytree(made / "hf", tmp_path / "hf"), copytree(made / "fp8", tmp_path / "fp8")


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("spread", [0, 30])
def test_half_a_step_is_what_rounding_is_off_by(spread: int) -> None:
    """No element is off by more; some by nearly as much; and every next fp8 is off by more, at least on one side."""
    weight = torch.randn(300, 200) * torch.exp2(torch.randint(-spread, 1, (300, 200)))
    codes, scales = slow_fp8(weight)
    off = (slow_plain(codes, scales) - weight).abs()
    allowed = torch.from_numpy(half_steps(weight.clone().numpy()))
    assert (off <= allowed).all() and (off > 0.95 * allowed).sum() > 500
    for step in (-1, 1):
        moved = bits(codes).int() + step
        fine = (moved & 127 != 127) & (moved & 127 != 0) & (moved >= 0)
        fine &= bits(codes) & 127 != 0
        other = slow_plain(moved.clamp(0, 255).to(torch.uint8).view(torch.float8_e4m3fn), scales)
        within = (other - weight).abs() <= allowed
        assert (within & fine).sum() < 0.001 * fine.sum()


def test_equal_within_half_a_step_whatever_the_other_form(both: Both, tmp_path: Path) -> None:
    source, quantized = both
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp2 pp2")
    for one, other in ((source, quantized), (quantized, source), (ranks, quantized), (quantized, ranks)):
        assert difference(one, other) is None
    done = CliRunner().invoke(app, ["verify", str(source), str(quantized)])
    assert done.exit_code == 0 and "equal: " in done.output and "in fp8, and equal within half a step" in done.output


def test_an_element_that_is_further_off_is_named(both: Both) -> None:
    source, quantized = both
    weight = tensors_of(source)[NAME]
    codes, scales = slow_fp8(weight)
    row, column = 129, 150
    next_code = bits(codes)[row, column].int().item() + 1
    change(quantized, lambda tensors: bits(tensors[NAME]).__setitem__((row, column), next_code))
    was, now = weight[row, column].item(), slow_plain(tensors_of(quantized)[NAME], scales)[row, column].item()
    assert difference(source, quantized) == f"{NAME}[{row}, {column}] is {was:.9g} in one and {now:.9g} in the other"
    done = CliRunner().invoke(app, ["verify", str(quantized), str(source)])
    assert done.exit_code == 1 and f"{NAME}[{row}, {column}]" in done.stderr


def test_a_scale_that_is_too_large_does_not_hide_what_is_lost(both: Both) -> None:
    """All weights 0, and a step as large as any of them: half a step is that of the other side's block."""
    source, quantized = both

    def lose(tensors: Tensors) -> None:
        bits(tensors[NAME]).zero_()
        tensors[SCALE].fill_(1e6)

    change(quantized, lose)
    assert f"{NAME}[0, 0]" in (difference(source, quantized) or "")


@pytest.mark.full
def test_two_in_fp8_are_compared_exactly(both: Both, tmp_path: Path) -> None:
    source, quantized = both
    other = converted(source, tmp_path / "other", dtype="fp8-block128", max_file_bytes=100_000)
    assert difference(quantized, other) is None
    change(quantized, lambda tensors: tensors[SCALE][1, 1].mul_(1 + 2.0**-20))
    assert f"{NAME}[128, 128]" in (difference(quantized, other) or "")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_allows_nothing(both: Both, value: float) -> None:
    source, quantized = both
    change(source, lambda tensors: tensors[NAME][129, 150].fill_(value))
    assert f"{NAME}[128, 128] is " in (difference(source, quantized) or ""), "nor does its first element"


@pytest.mark.full
def test_other_differences_are_found_as_before(both: Both) -> None:
    source, quantized = both
    change(quantized, lambda tensors: tensors["model.norm.weight"][3].add_(1))
    assert "model.norm.weight[3]" in (difference(source, quantized) or "")


@pytest.mark.full
def test_unequal_replicas_beside_fp8_are_refused(both: Both, tmp_path: Path) -> None:
    source, quantized = both
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2")
    path = ranks / "mp_rank_01_001" / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    stored["model"]["decoder.layers.1.input_layernorm.weight"][5] = 77
    torch.save(stored, path)
    with pytest.raises(ConvertError, match=r"input_layernorm.weight\[5\] .*copies of one weight must be equal"):
        difference(quantized, ranks)


UNFIT: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "without scales": (lambda t: t.pop(SCALE), rf"{NAME} of shape \(130, 200\) is float8_e4m3fn and needs {SCALE} of"),
    "other scales": (lambda t: t.update({SCALE: t[SCALE].bfloat16()}), rf"needs {SCALE} of shape \(2, 2\), float32"),
    "other blocks": (lambda t: t.update({SCALE: torch.ones(3, 4)}), rf"{SCALE} has shape \(3, 4\), config.json says"),
    "scales of nothing": (lambda t: t.update({NAME: t[NAME].bfloat16()}), f"{SCALE} is no tensor of this qwen2_moe"),
    "no matrix": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        r"model.norm.weight of shape \(200,\) is float8_e4m3fn and needs",
    ),
    "another fp8": (
        lambda t: t.update({NAME: t[NAME].float().to(torch.float8_e5m2)}),
        f"{SCALE} is no tensor of this qwen2_moe",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_fp8_that_is_not_understood_is_refused(both: Both, case: str) -> None:
    source, quantized = both
    edit, words = UNFIT[case]
    change(quantized, edit)
    with pytest.raises(ConvertError, match=words) as caught:
        difference(source, quantized)
    assert "\n" not in str(caught.value)


def test_weights_in_fp8_are_not_converted(both: Both, tmp_path: Path) -> None:
    _, quantized = both
    done = CliRunner().invoke(app, ["convert", str(quantized), str(tmp_path / "b")])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert "is float8_e4m3fn; types that can be converted are" in done.stderr
    assert "fp8 can be verified only" in done.stderr
    assert not (tmp_path / "b").exists()


def test_the_command_takes_it_and_refuses_other_types(both: Both, tmp_path: Path) -> None:
    source, quantized = both
    arguments = ["convert", str(source), str(tmp_path / "b"), "--dtype"]
    assert CliRunner().invoke(app, [*arguments, "fp8-block128"]).exit_code == 0
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (quantized / "model.safetensors").read_bytes()
    other = CliRunner().invoke(app, [*arguments, "fp8"])
    assert other.exit_code == 2 and "--dtype is 'fp8'; it is bfloat16, fp8-block128, or left out" in other.stderr
