"""Tensors that vLLM's modules hold beside their parameters: which of them no weight goes into, and why.

Read from the source of 0.26 and 0.32. Every other one may have been computed from weights at load (a head in another
type, split or transposed copies), and would keep its old values when a version is committed. Those that are written
with their weights are in `compat_mla.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_SCALES = "scales of an unquantized KV cache, 1 for all weights"
_PLACES = "which experts lie on this rank"
INDEPENDENT: Mapping[str, str] = {
    **dict.fromkeys(("_q_scale", "_k_scale", "_v_scale", "_prob_scale"), _SCALES),
    **dict.fromkeys(("_k_scale_cpu", "_v_scale_cpu"), _SCALES),
    **dict.fromkeys(("q_range", "k_range", "v_range"), "constants of the environment (before 0.32)"),
    **dict.fromkeys(("cos_sin_cache", "cos_sin_cache_bf16"), "angles of positions, from the config alone"),
    **dict.fromkeys(("_expert_map", "expert_mask", "expert_local_to_global"), _PLACES),
    **dict.fromkeys(("expert_global_to_physical", "expert_physical_to_global"), _PLACES),
    "alibi_slopes": "a function of the number of heads",
    "kv_cache": "keys and values, whose versions are kept account of",
    "_output": "what shared experts have computed in this step",
}
"""Names of buffers, of attributes and of lists of tensors, each with the reason."""

_HELPERS = ("impl", "quant_method")
"""Attributes that are no modules and compute for their module: an attention's kernel, a layer's method."""


def unexplained(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a module itself that are neither parameters nor INDEPENDENT, each with its path below the module.

    Looked at are buffers, attributes, lists and dicts of tensors, and attributes of what computes for the module.
    """
    held = {name: value for name, value in list(vars(module).items()) if name not in ("_parameters", "_buffers")}
    for name, value in (held | module._buffers).items():
        inside = getattr(value, "__dict__", {}) if name in _HELPERS else {"": value}
        for inner, found in list(inside.items()):
            path = ".".join(filter(None, (name, inner)))
            if (inner or name) not in INDEPENDENT:
                yield from _tensors(path, found)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{path}[{key!r}]", each) for key, each in list(items) if isinstance(each, torch.Tensor))


def made_later(module: Any) -> str:
    """The tensor that a module makes of weights in its first step and then keeps; empty for all others."""
    return "_combined_gate_weight" if getattr(module, "_fse_fuse_gate", False) else ""
