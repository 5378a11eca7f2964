"""What vLLM's latent attention (MLA) computes from `kv_b_proj` after loading, read from the source of 0.26 and 0.32.

Of each head's rows in `kv_b_proj.weight` [heads * (nope + v), latent] the first ones are W_UK, the others W_UV. Decodes
multiply with them, in one of two forms:

* views: `W_UV` and `W_UK_T` are parameters of the attention layer and lie in the memory of `kv_b_proj.weight`, so what
  is written there is in them. All kernels of unquantized weights but one.
* packed: AMX on a CPU (0.32). The kernel holds both, as a permutation of its own, and multiplies with nothing else;
  `kv_b_proj.weight` is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""W_UK and W_UV, packed."""


def is_latent(module: torch.nn.Module) -> bool:
    """True for the layer that computes latent attention; `kv_b_proj` is a module beside it."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(module, MLAAttention)


def packing_layers(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """`kv_b_proj` -> its attention layer, where that holds the weight in packed form."""
    latent: list[Any] = [module for module in model.modules() if is_latent(module)]
    return {layer.kv_b_proj: layer for layer in latent if getattr(layer, "is_amx_bmm_enabled", False)}


def packed(attention: Any) -> Pair:
    """What a packing layer multiplies with now; a reload makes new ones."""
    return attention.impl._w_uk_packed, attention.impl._w_uv_packed


def pack(attention: Any, weight: torch.Tensor) -> Pair:
    """What vLLM's own function makes of `weight`, the rows of any number of heads, for this layer. New tensors."""
    impl = attention.impl
    nope, v = impl.qk_nope_head_dim, impl.v_head_dim
    stand_in: Any = SimpleNamespace(
        kv_b_proj=SimpleNamespace(weight=weight, quant_method=None),
        kv_lora_rank=impl.kv_lora_rank,
        num_heads=weight.shape[0] // (nope + v),
        qk_nope_head_dim=nope,
        v_head_dim=v,
    )
    type(impl).process_weights_after_loading(stand_in, weight.dtype)
    return stand_in._w_uk_packed, stand_in._w_uv_packed


def apart(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a latent attention layer itself that a write into `kv_b_proj.weight` would not reach."""
    held = list(module.named_parameters(recurse=False)) if is_latent(module) else []
    views = _views(module) if held else {}
    for name, parameter in held:
        if name not in views or _place(parameter) != _place(views[name]):
            yield name, parameter


def _views(attention: Any) -> dict[str, torch.Tensor]:
    """As `MLAAttention.process_weights_after_loading` makes them where nothing has to be copied."""
    weight = attention.kv_b_proj.weight.data
    if weight.dim() != 2 or weight.shape[0] % attention.num_heads:
        return {}
    by_head = weight.T.view(weight.shape[1], attention.num_heads, -1)
    w_uk, w_uv = by_head[..., : attention.qk_nope_head_dim], by_head[..., attention.qk_nope_head_dim :]
    return {"W_UV": w_uv.transpose(0, 1), "W_UK_T": w_uk.permute(1, 2, 0)}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
