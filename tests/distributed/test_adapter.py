"""The adapter against Hugging Face bytes: loading, naming, masters. The oracle knows nothing of layout or plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megastream.families import family_of, load_shape
from megastream.rl import oracle
from megastream.trainer import model
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.config import TrainerConfig
from megastream.trainer.stepper import Listener
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import (
    BATCH,
    MICROBATCHES,
    SEQUENCE,
    batches,
    gathered,
    hf_config,
    hf_dtype,
    hf_shapes,
    tiny_config,
    tiny_glm4,
)


def tagged(config: TrainerConfig) -> dict[str, torch.Tensor]:
    """Every element of the model is another integer, so any element in a wrong place shows."""
    tensors, at = {}, 1
    for name, shape in hf_shapes(config).items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(at, at + size, dtype=torch.float32).view(shape)
        at += size
    assert at < 2**24
    return tensors


def random(config: TrainerConfig) -> dict[str, torch.Tensor]:
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * noise if "norm" in name else noise * shape[-1] ** -0.5
        tensors[name] = value.to(hf_dtype(config, name))
    return tensors


def _adapter(config: TrainerConfig, bucket_elements: int = 6000) -> tuple[list[Any], Any, MegatronAdapter]:
    chunks, optimizer = model.build(config)
    shape = load_shape(hf_config(config))
    return (
        chunks,
        optimizer,
        MegatronAdapter(chunks, optimizer, family_of(shape), shape, bucket_elements=bucket_elements),
    )


def _load_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str) -> list[str]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    _, _, adapter = _adapter(config)
    adapter.load_hf(folder)
    adapter.save_raw(f"{folder}/raw")
    layout = adapter.describe()
    assert (layout.rank, layout.world_size) == (rank, world_size)
    assert [buffer.name for buffer in layout.buffers] == list(adapter.buffers)
    return [f"{shard.tensor} {shard.box}" for shard in layout.shards]


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        (dict(pp=2, ep=2), 4),
        (dict(tp=2, ep=2, etp=1), 2),
        pytest.param(dict(tp=2), 2, marks=pytest.mark.full),
        pytest.param(dict(pp=2, vpp=2), 2, marks=pytest.mark.full),
        pytest.param(dict(pp=2, tied=True), 2, marks=pytest.mark.full),
    ],
    ids=["pp2 ep2", "tp2 ep2 etp1", "tp2", "pp2 vpp2", "pp2 tied"],
)
def test_loaded_parameters_are_the_checkpoint(settings: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    check_loaded(tiny_config(dtype="float32", **settings), world_size, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("settings", "world_size"), [(dict(pp=2, ep=2), 4), (dict(tp=2, pp=2, vpp=2), 4)])
def test_loaded_routers_biases_are_the_checkpoint(settings: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    check_loaded(tiny_glm4(dtype="float32", **settings), world_size, tmp_path)


def check_loaded(config: TrainerConfig, world_size: int, tmp_path: Path) -> None:
    """What every rank holds, by a slow gather, is the checkpoint that was loaded."""
    expected = tagged(config)
    save_file(expected, tmp_path / "model.safetensors")
    run_ranks(_load_body, world_size, config=config, folder=str(tmp_path))
    dumps = [oracle.read_dump(tmp_path / f"raw/rank{rank}.safetensors") for rank in range(world_size)]
    found = gathered(dumps, config)
    if config.tied:
        assert torch.equal(found.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def _padded_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str) -> int:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer = model.build(replace(config, vocab=config.vocab + 10))
    shape = load_shape(hf_config(config))
    adapter = MegatronAdapter(chunks, optimizer, family_of(shape), shape)
    adapter.load_hf(folder)
    return sum(shard.box.volume for shard in adapter.describe().shards if shard.tensor == "lm_head.weight")


def test_a_padded_vocabulary_is_filled_up_to_the_real_one(tmp_path: Path) -> None:
    config = tiny_config(tp=2, layers=1, dtype="float32")
    save_file(tagged(config), tmp_path / "model.safetensors")
    rows = [size // config.hidden for size in run_ranks(_padded_body, 2, config=config, folder=str(tmp_path))]
    assert rows == [56, 46]


def _masters_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str
) -> dict[str, dict[str, bool]]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = _adapter(config)
    adapter.load_hf(folder)

    def step() -> dict[str, torch.Tensor]:
        """All buffers before it."""
        before = {name: buffer.clone() for name, buffer in adapter.buffers.items()}
        model.train_step(
            chunks,
            batches(config, 0, mesh_coords()["dp"]),
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        assert adapter.stepper("pipelined", Listener(print)).step().ok
        return before

    def unchanged_by_step() -> dict[str, bool]:
        return {name: torch.equal(before, adapter.buffers[name]) for name, before in step().items()}

    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    set_rate(0.0)
    good = unchanged_by_step()
    set_rate(1e-3)
    small = {}
    for name, before in step().items():
        # Adam moves a weight by about the rate at most, and bf16 rounds to 8 bits.
        moved, bound = (adapter.buffers[name] - before).abs().float(), 1.01e-3 + before.abs().float() / 256
        small[name] = bool((moved <= bound).all() and moved.any())
    set_rate(0.0)
    for buffer in adapter.buffers.values():
        buffer.mul_(1.5)
    return {"masters reset": good, "bounded": small, "masters stale": unchanged_by_step()}


@pytest.mark.full
def test_a_step_with_lr_0_leaves_loaded_weights(tmp_path: Path) -> None:
    """One with another rate moves them by no more than it allows.

    And weights written behind the optimizer's back are lost, which is what `load_hf` must prevent.
    """
    config = tiny_config(pp=2, ep=2)
    save_file(random(config), tmp_path / "model.safetensors")
    for result in run_ranks(_masters_body, 4, config=config, folder=str(tmp_path)):
        assert all(result["masters reset"].values())
        assert all(result["bounded"].values())
        assert not any(result["masters stale"].values())


def _refusals_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str) -> list[str]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = _adapter(config)
    messages, shape = [], load_shape(hf_config(config))

    def refused(call: Any) -> None:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")

    refused(lambda: adapter.load_hf(f"{folder}/empty"))
    refused(lambda: adapter.load_hf(f"{folder}/short"))
    refused(lambda: adapter.load_hf(f"{folder}/small"))
    refused(lambda: adapter.stepper("never", Listener(print)))  # type: ignore[arg-type]
    refused(lambda: adapter.stepper("speculative", Listener(print)))
    adapter.stepper("whole", Listener(print)).close()
    refused(lambda: MegatronAdapter(chunks, optimizer, adapter.family, shape, finality="early"))
    chunks[0].config.calculate_per_token_loss = True
    refused(lambda: MegatronAdapter(chunks, optimizer, adapter.family, shape, finality="speculative"))
    chunks[0].config.calculate_per_token_loss = False
    adapter = MegatronAdapter(chunks, optimizer, adapter.family, shape, finality="speculative")
    refused(lambda: adapter.stepper("early", Listener(print)))
    first = adapter.stepper("speculative", Listener(print))
    refused(lambda: adapter.stepper("speculative", Listener(print)))
    first.close()
    adapter.stepper("speculative", Listener(print)).close()
    optimizer.config.loss_scale = 128.0
    refused(lambda: MegatronAdapter(chunks, optimizer, adapter.family, shape))
    optimizer.config.loss_scale = None
    optimizer.config.optimizer = "muon"
    refused(lambda: MegatronAdapter(chunks, optimizer, adapter.family, shape))
    optimizer.config.optimizer = "adam"
    chunks[0].ddp_config.overlap_param_gather = True
    refused(lambda: MegatronAdapter(chunks, optimizer, adapter.family, shape))
    return messages


def test_refusals_name_the_thing(tmp_path: Path) -> None:
    config = tiny_config(layers=1)
    tensors = random(config)
    for name in ("empty", "short", "small"):
        (tmp_path / name).mkdir()
    short = {name: value for name, value in tensors.items() if name != "model.norm.weight"}
    save_file(short, tmp_path / "short/model.safetensors")
    small = {**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1].clone()}
    save_file(small, tmp_path / "small/model.safetensors")
    (messages,) = run_ranks(_refusals_body, 1, config=config, folder=str(tmp_path))
    for message, part in zip(
        messages,
        [
            "no *.safetensors file",
            "has no tensor model.norm.weight, which rank 0 trains",
            "lm_head.weight in",
            "finality policy 'never' is unknown; use whole, pipelined, speculative, early",
            r"finality 'speculative' .* were cut for 'pipelined'; make it with MegatronAdapter\(..., finality='specul",
            "finality 'early' cannot clip, but the clipping norm is 1: .*use 'speculative', which takes such",
            "TransformerConfig.calculate_per_token_loss=True is not supported with finality 'speculative'",
            "finality 'early' cannot clip",
            "gradients of this model are already streamed by another stepper; close it first",
            "OptimizerConfig.loss_scale=128.0 is not supported",
            "OptimizerConfig.optimizer='muon' is not supported",
            "DistributedDataParallelConfig.overlap_param_gather=True is not supported",
        ],
        strict=True,
    ):
        assert re.search(part.replace("*.safe", "\\*.safe"), message), message


def _logits_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str) -> Any:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, _, adapter = _adapter(config)
    adapter.load_hf(folder)
    tokens = next(batches(config, 0, 0)).tokens[:, :-1]
    ahead = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(diagonal=1)[None, None]
    chunks[0].eval()
    with torch.no_grad():
        return chunks[0](tokens, torch.arange(SEQUENCE)[None].expand(BATCH, -1), ahead).float().numpy()


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """fp32, so that only rounding is left; swapping two experts is seen at once."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = tiny_config(dtype="float32")
    tensors = random(config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (logits,) = run_ranks(_logits_body, 1, config=config, folder=str(tmp_path))
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**hf_config(config), attn_implementation="eager"))
    ours = torch.from_numpy(logits)

    def difference(weights: dict[str, torch.Tensor]) -> float:
        folder = tmp_path / "reference"
        folder.mkdir(exist_ok=True)
        reference.config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        loaded = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            theirs = loaded(next(batches(config, 0, 0)).tokens[:, :-1]).logits
        return float((ours - theirs).abs().max())

    swapped = dict(tensors)
    one, two = (f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in (1, 2))
    swapped[one], swapped[two] = tensors[two], tensors[one]
    assert difference(tensors) < 2e-5
    assert difference(swapped) > 1e-2
