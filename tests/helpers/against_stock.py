"""A training by stock `optimizer.step()` or by a finality policy, from a Hugging Face checkpoint, with what it left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megastream.layout.shard import RankLayout
from megastream.trainer import model
from megastream.trainer.adapter import mesh_coords
from megastream.trainer.config import TrainerConfig
from megastream.trainer.model import TokenBatch
from megastream.trainer.policies import is_streamed
from megastream.trainer.stepper import Listener
from tests.helpers.tiny import BATCH, SEQUENCE, hf_config, hf_dtype, hf_shapes
from tests.helpers.training import adapter_of, digest, outcome, parameters, router_biases, set_rate, update


def num_microbatches(config: TrainerConfig) -> int:
    """Several, so that gradients are accumulated; virtual stages want a multiple of the real ones."""
    return max(2, config.pp)


def masked_batches(config: TrainerConfig, step: int, replica: int) -> Iterator[TokenBatch]:
    """The microbatches of a step on one replica; in each another number of tokens counts."""
    generator = torch.Generator().manual_seed(step * 1000 + replica)
    for number in range(num_microbatches(config)):
        tokens = torch.randint(0, config.vocab, (BATCH, SEQUENCE + 1), generator=generator)
        counted = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.9 - 0.2 * number
        yield TokenBatch(tokens, counted.float())


def random_checkpoint(config: TrainerConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    """Hugging Face tensors in which no two layers, experts or norms are alike."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * noise if "norm" in name else noise * shape[-1] ** -0.5
        tensors[name] = value.to(hf_dtype(config, name))
    return tensors


def forward_backward(chunks: list[Any], config: TrainerConfig, step: int) -> float | None:
    """One step's gradients, on the batches of this rank's replica."""
    return model.train_step(
        chunks,
        masked_batches(config, step, mesh_coords()["dp"]),
        num_microbatches=num_microbatches(config),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def train(config: TrainerConfig, policy: Any, steps: int, folder: str, export: str = "") -> dict[str, Any]:
    """A whole training; `policy` is "stock" or a finality policy. Every rank calls it and gets its own facts.

    Policies that stream out of the backward send the owners' slices, the others whole replicas. `complete` says that
    in every step each bucket was final once.

    With `export` the raw parameters go there, and the facts hold the loss of one more batch and this rank's shards.
    """
    chunks, optimizer, adapter = adapter_of(config, policy, "slice" if is_streamed(policy) else "replica")
    adapter.load_hf(folder)
    final: list[str] = []
    complete, stepper = True, None
    if policy != "stock":
        stepper = adapter.stepper(policy, Listener(final.append, withdrawn=final.clear), max_abort_rate=1.0)
    params = parameters(chunks)
    before = [p.detach().clone() for p in params]
    trace = []
    for step in range(steps):
        set_rate(config, optimizer, step)
        loss = forward_backward(chunks, config, step)
        trace.append((loss, update(optimizer, stepper)))
        complete &= stepper is None or sorted(final) == sorted(adapter.buffers)
        final.clear()
    if stepper is not None:
        stepper.close()
    facts = {
        **outcome(params, before, optimizer),
        "biases": digest(router_biases(chunks)),
        "trace": trace,
        "clipped": sum(norm > config.clip > 0 for _, norm in trace),
        "complete": complete,
        "replica": mesh_coords()["dp"],
    }
    if export:
        adapter.save_raw(export)
        facts["shards"] = cut_by_layout(adapter.describe(), adapter.buffers)
        facts["next_loss"] = forward_backward(chunks, config, steps)
    return facts


Boxes = list[tuple[str, tuple[slice, ...], torch.Tensor]]


def cut_by_layout(layout: RankLayout, buffers: dict[str, torch.Tensor]) -> Boxes:
    """What a layout says of its own bytes: (tensor, region, values) of every shard."""
    found = []
    for shard in layout.shards:
        flat, box = buffers[shard.buffer], shard.box
        values = flat.as_strided(box.shape, shard.strides, flat.storage_offset() + shard.offset)
        found.append((shard.tensor, tuple(map(slice, box.lo, box.hi)), values.detach().cpu().clone()))
    return found


def put_together(config: TrainerConfig, ranks: Iterable[Boxes]) -> dict[str, torch.Tensor]:
    """Full tensors from the shards of all ranks: complete, and the same wherever two ranks hold an element."""
    shapes = hf_shapes(config)
    full = {name: torch.full(shape, float("nan"), dtype=hf_dtype(config, name)) for name, shape in shapes.items()}
    for boxes in ranks:
        for name, region, values in boxes:
            held = full[name][region]
            assert torch.equal(held.isnan() | (held == values), torch.ones_like(held, dtype=torch.bool)), name
            held.copy_(values)
    assert [name for name, tensor in full.items() if tensor.isnan().any()] == []
    return full


def transformers_loss(config: TrainerConfig, folder: Path, batches: Iterable[TokenBatch]) -> float:
    """The loss of the checkpoint in `folder` on these microbatches, by `transformers` in fp32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    losses, weights = [], []
    for batch in batches:
        assert batch.mask is not None
        with torch.no_grad():
            logits = reference(batch.tokens[:, :-1]).logits.float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        losses.append(float((each * batch.mask.flatten()).sum()))
        weights.append(float(batch.mask.sum()))
    if config.per_token_loss:
        return sum(losses) / sum(weights)
    return sum(loss / weight for loss, weight in zip(losses, weights, strict=True)) / len(losses)


def write_checkpoint(config: TrainerConfig, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder that `transformers` and `MegatronAdapter.load_hf` read."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return folder
