"""Megatron's model of every family, filled through our trainer layout.

It is built by hand, from megatron's own local specs, so that it does not depend on what the product builds.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megastream.families import family_of, load_shape
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.layout.trainer import TrainerParam, trainer_rank_layout
from megastream.trainer import compat
from tests.helpers.family_models import FAMILY_MODELS, SEQUENCE, tokens

ALONE = {f"{axis}{end}": n for axis in ("tp", "etp", "pp", "ep") for end, n in (("", 0), ("_size", 1))}


def megatron_logits(
    rank: int, world_size: int, init_method: str, family: str, folder: str, swapped: tuple[str, str] | None = None
) -> Any:
    """Logits of Megatron's model with the weights in `folder`, as numpy; with two tensors exchanged if asked to.

    All ranks share the model by tensor parallelism.
    """
    from safetensors.torch import load_file

    compat.install()
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(world_size, create_gloo_process_groups=False)
    raw = json.loads((Path(folder) / "config.json").read_text())
    weights = load_file(Path(folder) / "model.safetensors")
    if swapped:
        weights |= {swapped[0]: weights[swapped[1]], swapped[1]: weights[swapped[0]]}
    model = build(family, raw["vocab_size"], world_size).eval()
    fill(model, raw, weights, rank, world_size)
    if FAMILY_MODELS[family].centred:
        _count_from_one(model)
    ahead = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(diagonal=1)[None, None]
    with torch.no_grad():
        return model(tokens(), torch.arange(SEQUENCE)[None].expand(2, -1), ahead).float().numpy()


def _count_from_one(model: Any) -> None:
    """What `layernorm_zero_centered_gamma` does to Transformer Engine's norms; the plain ones here refuse it."""
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data += 1


def build(family: str, vocab: int, tp: int, **mesh: Any) -> Any:
    """GPTModel of a family in fp32, local specs, a rank's part of it. Needs megatron's mesh."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    ours = FAMILY_MODELS[family]
    c = ours.config(family)
    fixed: dict[str, Any] = dict(
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_key_value_heads"],
        kv_channels=c["head_dim"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=c["rms_norm_eps"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        tensor_model_parallel_size=tp,
    )
    fixed |= ours.megatron | mesh
    fusions = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    if fixed["activation_func"] == "quick_gelu":
        fixed["activation_func"] = quick_gelu
    kind = MLATransformerConfig if ours.mla else TransformerConfig
    transformer = kind(**fixed, **dict.fromkeys((*fusions, "apply_rope_fusion"), False))
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm")
    if ours.mla:
        _run_latent_attention(spec)
    _run_delta_nets(spec, ours.delta)
    rope: dict[str, Any] = dict(position_embedding_type="rope", rotary_base=int(c["rope_theta"]))
    return GPTModel(
        transformer,
        spec,
        vocab_size=vocab,
        max_sequence_length=c["max_position_embeddings"],
        share_embeddings_and_output_weights=c["tie_word_embeddings"],
        parallel_output=False,
        mtp_block_spec=get_gpt_mtp_block_spec(transformer, spec, False) if transformer.mtp_num_layers else None,
        **{**rope, **ours.gpt},
    )


def fill(model: Any, raw: dict[str, Any], weights: dict[str, torch.Tensor], rank: int = 0, tp: int = 1) -> None:
    """Writes every parameter of a rank through our trainer layout; all of it, and from all of the tensors."""
    shape = load_shape(raw)
    family = family_of(shape)
    specs = {spec.name: spec.shape for spec in family.tensors(shape)}
    assert {name: family.file_shape(name, shape) for name in specs} == {n: tuple(t.shape) for n, t in weights.items()}
    held = dict(model.named_parameters())
    # The router's bias is a buffer; the other ones belong to no checkpoint.
    held |= {name: tensor for name, tensor in model.named_buffers() if name.endswith("router.expert_bias")}
    for tensor in held.values():
        tensor.data.fill_(float("nan"))
    params = [TrainerParam(name, tuple(tensor.shape), name, 0) for name, tensor in held.items()]
    buffers = [BufferSpec(name, tensor.numel(), "float32") for name, tensor in held.items()]
    coords = ALONE | dict(tp=rank, etp=rank, tp_size=tp, etp_size=tp)
    layout: RankLayout = trainer_rank_layout(
        family, shape, rank=rank, world_size=tp, coords=coords, params=params, buffers=buffers
    )
    for shard in layout.shards:
        region = held[shard.buffer].data.view(-1).as_strided(shard.box.shape, shard.strides, shard.offset)
        region.copy_(weights[shard.tensor].view(specs[shard.tensor])[tuple(map(slice, shard.box.lo, shard.box.hi))])
    assert [name for name, tensor in held.items() if tensor.isnan().any()] == []
    assert {shard.tensor for shard in layout.shards} == set(weights)


def _run_latent_attention(spec: Any) -> None:
    """Megatron's MLA asks Transformer Engine's attention for head sizes that its plain one does not take."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class OfTwoWidths(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            super().__init__(*args, **named)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    multi_latent_attention.HAVE_TE = False
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = OfTwoWidths


def _run_delta_nets(spec: Any, layers: Collection[int]) -> None:
    """Megatron's `GatedDeltaNet` in these layers. Of the kernels' package (fla) its plain code needs the norm alone.

    Its own spec is for Transformer Engine; these are the local linears and norm.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = _l2norm
    for number in layers:
        layer = spec.layer_specs[number]
        parts = gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=layer.submodules.input_layernorm, out_proj=RowParallelLinear
        )
        attention = ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)
        spec.layer_specs[number] = replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
