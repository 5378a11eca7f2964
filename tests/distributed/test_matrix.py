"""Every feature and layout, in pairs: steps equal stock bit for bit, and shards are what they are described to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megastream.rl import oracle
from megastream.trainer import model
from megastream.trainer.config import TrainerConfig
from tests.helpers import matrix
from tests.helpers.against_stock import (
    masked_batches,
    put_together,
    random_checkpoint,
    train,
    transformers_loss,
    write_checkpoint,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import gathered, tiny_config

pytestmark = pytest.mark.timeout(900)  # twelve ranks on two cores

STEPS = 20
COMPARED = ("trace", "params", "moments", "masters", "biases")

CASES = [
    "qwen2 bf16 dp1 tp1 cp1 pp1 vpp1 ep1 etp1 even tied clipped full microbatch overlapped allgather",
    "qwen3 fp32 dp2 tp1 cp1 pp1 vpp1 ep2 etp1 even untied unclipped selective token late alltoall",
    "qwen2 fp32 dp1 tp1 cp2 pp2 vpp2 ep1 etp2 uneven tied unclipped none token overlapped alltoall",
    "qwen3 bf16 dp1 tp2 cp1 pp2 vpp2 ep1 etp2 uneven untied clipped selective microbatch late allgather",
    "qwen3 fp32 dp2 tp1 cp2 pp1 vpp1 ep2 etp2 even untied unclipped full microbatch late allgather",
    "qwen2 bf16 dp1 tp2 cp1 pp2 vpp1 ep1 etp2 ends tied unclipped none token overlapped alltoall",
    "qwen3 bf16 dp1 tp1 cp2 pp3 vpp2 ep2 etp1 ends untied unclipped none microbatch overlapped allgather",
    "qwen3 fp32 dp2 tp1 cp1 pp3 vpp2 ep1 etp1 even tied clipped none microbatch late alltoall",
    "qwen2 bf16 dp4 tp2 cp1 pp1 vpp1 ep4 etp2 even untied unclipped none token overlapped allgather",
    "qwen3 fp32 dp4 tp1 cp1 pp2 vpp2 ep4 etp1 even tied clipped full microbatch late alltoall",
    "qwen2 bf16 dp2 tp2 cp1 pp2 vpp1 ep2 etp2 uneven tied clipped selective microbatch overlapped allgather",
    "qwen3 fp32 dp1 tp2 cp2 pp2 vpp1 ep4 etp1 uneven tied clipped selective token overlapped allgather",
    "qwen3 bf16 dp4 tp1 cp2 pp1 vpp1 ep2 etp2 even untied clipped full token overlapped allgather",
    "qwen2 fp32 dp2 tp2 cp1 pp3 vpp1 ep4 etp1 ends tied clipped full token late alltoall",
    "qwen2 bf16 dp4 tp1 cp1 pp3 vpp2 ep1 etp2 ends tied unclipped selective microbatch overlapped alltoall",
    "qwen3 bf16 dp4 tp1 cp1 pp3 vpp2 ep2 etp1 uneven tied clipped full microbatch late alltoall",
    "qwen3 bf16 dp1 tp1 cp1 pp2 vpp1 ep1 etp1 ends tied clipped none microbatch late allgather",
]

HEART = "qwen3 fp32 dp2 tp1 cp1 pp1"
"""The case that is always run."""


def test_the_cases_cover_every_two_values() -> None:
    cases = [matrix.read(row) for row in CASES]
    assert all(matrix.is_possible(case) for case in cases)
    covered = {pair for case in cases for pair in matrix.pairs(case)}
    assert sorted(matrix.possible_pairs() - covered) == []


def _body(
    rank: int,
    world_size: int,
    init_method: str,
    config: TrainerConfig,
    folder: str,
    policies: tuple[str, ...],
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=300)
    stock = train(config, "stock", steps, folder)
    return [stock, *(train(config, policy, steps, folder, export=f"{folder}/{policy}") for policy in policies)]


def policies_of(case: matrix.Case) -> tuple[str, ...]:
    """Those that promise stock's bits here.

    Out of the backward each bucket is summed by itself; how more than two replicas are summed depends on where an
    element lies in what is summed at once. And a number of tokens is known only after it.
    """
    if case["loss"] == "token" or matrix.number(case, "dp") * matrix.number(case, "cp") > 2:
        return ("pipelined",)
    return ("pipelined", "speculative" if case["clip"] == "clipped" else "early")


def compare(case: matrix.Case, folder: Path) -> None:
    """A case's config and policies."""
    compare_steps(matrix.config_of(case), matrix.ranks(case), policies_of(case), folder)


def compare_steps(config: TrainerConfig, world_size: int, policies: tuple[str, ...], folder: Path) -> None:
    """Bits against stock on every rank; then what the ranks say they hold against two oracles that know no layout."""
    write_checkpoint(config, folder, random_checkpoint(config))
    results = run_ranks(_body, world_size, config=config, folder=str(folder), policies=policies, timeout_s=840)
    for stock, *others in results:
        assert stock["unmoved"] == 0
        assert stock["clipped"] == (STEPS if config.clip else 0)
        for facts in others:
            assert facts["complete"]
            assert [key for key in COMPARED if facts[key] != stock[key]] == []
    for index, policy in enumerate(policies, 1):
        ranks = [facts[index] for facts in results]
        exported = _check_shards(config, folder, policy, ranks)
        if config.dtype == "float32":  # in bf16 rounding decides which experts are chosen: no loss is near another
            _check_loss(config, exported, ranks)


def _check_shards(config: TrainerConfig, folder: Path, policy: str, ranks: list[dict[str, Any]]) -> Path:
    """The model that the shards of all ranks make is the one that a slow gather finds. The folder that holds it."""
    full = put_together(config, (facts["shards"] for facts in ranks))
    dumps = [oracle.read_dump(folder / policy / f"rank{rank}.safetensors") for rank in range(len(ranks))]
    found = gathered(dumps, config)
    if config.tied:
        assert torch.equal(
            found.pop("lm_head.weight", found["model.embed_tokens.weight"]), full["model.embed_tokens.weight"]
        )
    assert found.keys() == full.keys()
    assert [name for name in full if not torch.equal(full[name], found[name])] == []
    return write_checkpoint(config, folder / "exported", full)


def _check_loss(config: TrainerConfig, exported: Path, ranks: list[dict[str, Any]], steps: int = STEPS) -> None:
    """transformers, on the exported model, finds the loss that Megatron found next, on every replica."""
    losses = {facts["replica"]: facts["next_loss"] for facts in ranks if facts["next_loss"] is not None}
    for replica, loss in losses.items():
        expected = transformers_loss(config, exported, masked_batches(config, steps, replica))
        assert loss == pytest.approx(expected, abs=3e-5)


def _other_layer(name: str) -> str:
    """The same tensor of the other of two layers."""
    return re.sub(r"layers\.(\d)", lambda match: f"layers.{1 - int(match[1])}", name)


def test_a_wrong_description_shows(tmp_path: Path) -> None:
    """Layers exchanged: in the shards alone the gather notices, in all names (a wrong rule) transformers does."""
    config = tiny_config(layers=2, experts=4, dtype="float32")
    write_checkpoint(config, tmp_path, random_checkpoint(config))
    arguments = dict(config=config, folder=str(tmp_path), policies=("pipelined",), steps=2)
    ((_, facts),) = run_ranks(_body, 1, **arguments)
    _check_loss(config, _check_shards(config, tmp_path, "pipelined", [facts]), [facts], steps=2)
    wrong = {**facts, "shards": [(_other_layer(name), *rest) for name, *rest in facts["shards"]]}
    with pytest.raises(AssertionError, match=r"layers\.0"):
        _check_shards(config, tmp_path, "pipelined", [wrong])
    raw = tmp_path / "pipelined/rank0.safetensors"
    with safe_open(raw, "pt") as file:
        metadata = file.metadata()
    save_file({_other_layer(name): value for name, value in load_file(raw).items()}, raw, metadata)
    exported = _check_shards(config, tmp_path, "pipelined", [wrong])
    with pytest.raises(AssertionError):
        _check_loss(config, exported, [wrong], steps=2)


def _param(row: str) -> Any:
    """An axis of size 1 need not be told in a test's name."""
    name = " ".join(value for value in row.split() if not re.fullmatch(r"[a-z]+1", value))
    return pytest.param(row, id=name, marks=[] if row.startswith(HEART) else pytest.mark.full)


@pytest.mark.parametrize("row", [_param(row) for row in CASES])
def test_steps_equal_stock_and_shards_are_as_described(row: str, tmp_path: Path) -> None:
    compare(matrix.read(row), tmp_path)
