"""Single features beside the pairs of test_matrix: against transformers, against each other, and refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.families import family_of, load_shape
from megastream.trainer import gpt, model
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.config import TrainerConfig
from tests.helpers.against_stock import (
    forward_backward,
    masked_batches,
    random_checkpoint,
    transformers_loss,
    write_checkpoint,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import BATCH, SEQUENCE, hf_config, tiny_config, tiny_qwen2
from tests.helpers.training import BUCKET_ELEMENTS


def _adapter(config: TrainerConfig, family: str = "qwen3_moe") -> tuple[list[Any], Any, MegatronAdapter]:
    chunks, optimizer = model.build(config)
    shape = load_shape({**hf_config(config), "model_type": family})
    adapter = MegatronAdapter(chunks, optimizer, family_of(shape), shape, bucket_elements=BUCKET_ELEMENTS)
    return chunks, optimizer, adapter


def loss_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str, megatron: dict[str, Any]
) -> float | None:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    if megatron:  # what a training script of its own may set, and our config does not
        ours = gpt.transformer_config
        model.transformer_config = lambda *args: replace(ours(*args), **megatron)
    chunks, _, adapter = _adapter(config, hf_config(config)["model_type"])
    adapter.load_hf(folder)
    return forward_backward(chunks, config, 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "megatron"),
    [
        (4, dict(num_layers_in_first_pipeline_stage=1)),
        (5, dict(num_layers_in_last_pipeline_stage=2)),
        (5, dict(account_for_embedding_in_pipeline_split=True)),
        (4, dict(pipeline_model_parallel_layout="Et|tttL")),
    ],
    ids=["first", "last", "embedding", "layout"],
)
def test_layers_of_a_framework_s_own_split_are_loaded(layers: int, megatron: dict[str, Any], tmp_path: Path) -> None:
    """The loss is transformers' loss: layer numbers come from the modules, not from our config."""
    config = tiny_config(pp=2, layers=layers, stage_layers=(2, layers - 2), dtype="float32")
    write_checkpoint(config, tmp_path, random_checkpoint(config))
    megatron = {"pipeline_model_parallel_layout": None, **megatron}
    _, loss = run_ranks(loss_body, 2, config=config, folder=str(tmp_path), megatron=megatron)
    assert loss == pytest.approx(transformers_loss(config, tmp_path, masked_batches(config, 0, 0)), abs=2e-5)


def test_qwen2_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Biases, the shared expert and its gate are loaded, cut by TP: the loss changes with each of them."""
    config = tiny_qwen2(tp=2, ep=2, etp=1, layers=2, dtype="float32")
    tensors = random_checkpoint(config)
    write_checkpoint(config, tmp_path, tensors)
    losses = run_ranks(loss_body, 2, config=config, folder=str(tmp_path), megatron={})
    batches = list(masked_batches(config, 0, 0))
    assert losses == [pytest.approx(transformers_loss(config, tmp_path, batches), abs=2e-5)] * 2
    for name in ("self_attn.k_proj.bias", "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight"):
        name = f"model.layers.1.{name}"
        other = write_checkpoint(config, tmp_path / "other", {**tensors, name: tensors[name] * -2})
        assert abs(losses[0] - transformers_loss(config, other, batches)) > 1e-3, name


def _gradients_body(
    rank: int, world_size: int, init_method: str, configs: list[TrainerConfig]
) -> list[tuple[list[torch.Tensor], int, int]]:
    """Of each config: all gradients, and how often attention cores and layers ran forward."""
    model.start_process_group(configs[0], rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    results = []
    for config in configs:
        chunks, _ = model.build(config)
        calls = {"core_attention": 0, "layer": 0}

        def count(kind: str, calls: dict[str, int] = calls) -> Any:
            def hook(*_: Any) -> None:
                calls[kind] += 1

            return hook

        for name, module in chunks[0].named_modules():
            if name.endswith("core_attention"):
                module.register_forward_pre_hook(count("core_attention"))
            if name.rpartition(".")[0].endswith("decoder.layers"):
                module.register_forward_pre_hook(count("layer"))
        forward_backward(chunks, config, 0)
        gradients = [param.main_grad.clone() for param in chunks[0].parameters()]
        results.append((gradients, calls["core_attention"], calls["layer"]))
    return results


def test_recomputed_activations_change_no_bit() -> None:
    configs = [tiny_config(layers=2, recompute=recompute) for recompute in ("none", "selective", "full")]
    ((none, selective, full),) = run_ranks(_gradients_body, 1, configs=configs)
    microbatches = 2
    assert none[1:] == (2 * microbatches, 2 * microbatches)
    assert selective[1:] == (4 * microbatches, 2 * microbatches)
    assert full[1:] == (4 * microbatches, 4 * microbatches)
    for gradients, _, _ in (selective, full):
        assert all(torch.equal(a, b) for a, b in zip(none[0], gradients, strict=True))


def _weights_body(rank: int, world_size: int, init_method: str) -> list[list[torch.Tensor]]:
    """Gradients of [A, A] and [B, B] by microbatch, of [A, B] by token; A counts more tokens than B."""
    config = tiny_config(layers=1, dtype="float32")
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    a, b = masked_batches(config, 0, 0)
    results = []
    for token, batches in ((False, (a, a)), (False, (b, b)), (True, (a, b))):
        chunks, _ = model.build(replace(config, per_token_loss=token))
        model.train_step(chunks, iter(batches), num_microbatches=2, seq_length=SEQUENCE, micro_batch_size=BATCH)
        results.append([param.main_grad.clone() for param in chunks[0].parameters()])
    return results


def test_every_token_weighs_the_same_with_per_token_loss() -> None:
    ((of_a, of_b, by_token),) = run_ranks(_weights_body, 1)
    count_a, count_b = (float(batch.mask.sum()) for batch in masked_batches(tiny_config(), 0, 0))  # type: ignore[union-attr]
    assert count_a > count_b
    for a, b, found in zip(of_a, of_b, by_token, strict=True):
        torch.testing.assert_close(found, (count_a * a + count_b * b) / (count_a + count_b), atol=1e-6, rtol=1e-4)
        if found.abs().max() > 1e-4:
            assert not torch.allclose(found, (a + b) / 2, atol=1e-6, rtol=1e-4)


def _refusals_body(rank: int, world_size: int, init_method: str, config: TrainerConfig) -> list[str]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = _adapter(config, "qwen2_moe")
    messages = []

    def refused(chunks: Any, name: str = "qwen2_moe") -> None:
        shape = load_shape({**hf_config(config), "model_type": name})
        try:
            MegatronAdapter(chunks, optimizer, family_of(shape), shape)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")

    for name, value in REFUSED:
        owner = chunks[0].config if name in chunks[0].config.__dict__ or "legacy" in name else chunks[0].ddp_config
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        refused(chunks)
        setattr(owner, name, before)
    refused([chunks[0].module])
    refused(chunks, "qwen3_moe")
    refused(chunks)
    with pytest.raises(ValueError) as error:
        _adapter(tiny_config(layers=1, router_expert_bias=True), "qwen3_moe")
    return [*messages, str(error.value)]


REFUSED: tuple[tuple[str, Any], ...] = (
    ("mtp_num_layers", 1),
    ("multi_latent_attention", True),
    ("add_bias_linear", True),
    ("moe_use_legacy_grouped_gemm", True),
    ("fp8", "e4m3"),
    ("num_distributed_optimizer_instances", 2),
    ("use_distributed_optimizer", False),
    ("use_megatron_fsdp", True),
)


def test_what_a_framework_s_model_may_not_have_is_refused_by_name() -> None:
    (messages,) = run_ranks(_refusals_body, 1, config=tiny_qwen2(layers=1))
    for (name, value), message in zip(REFUSED, messages, strict=False):
        assert f"{name}={value} is not supported: " in message and "; " in message and "\n" not in message
    *_, unwrapped, without_rule, fine, without_row = messages
    assert "model chunk Float16Module is not supported: " in unwrapped
    assert "trainer parameter decoder.layers.0." in without_rule and "has no rule in family qwen3_moe" in without_rule
    assert fine == "not refused"
    bias = "trainer parameter decoder.layers.0.mlp.router.expert_bias"
    assert without_row == f"{bias} has no rule in family qwen3_moe: add a row to its table"
