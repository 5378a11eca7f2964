"""Engines that cannot be patched in place, each refused by name with the remedy (LiveModelError)."""

from __future__ import annotations

from typing import Any

import torch

from megastream.engine.contract import LiveModelError
from megastream.engine.vllm import compat, compat_mla, compat_tensors
from megastream.engine.vllm.buffers import Absorbed, LiveBuffer, PackedLinear

PATCHABLE_MOE = ("TRITON", "BATCHED_TRITON", "CPU")
"""MoE backends whose live experts keep the loader's layout, or (CPU) a permutation of it that can be undone."""


def refuse_config(vllm_config: Any) -> None:
    """What the configuration alone rules out."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tied = bool(model.hf_config.tie_word_embeddings)
    refusals = (
        (model.quantization, f"weights are quantized ({model.quantization})", "serve an unquantized checkpoint"),
        (vllm_config.lora_config, "LoRA is enabled", "leave out --enable-lora"),
        (parallel.enable_eplb, "experts are rebalanced while serving (EPLB)", "leave out --enable-eplb"),
        (vllm_config.speculative_config, "a draft model is in use", "leave out --speculative-config"),
        (compat.in_data_parallel(vllm_config), "several engine cores share the model", "use --data-parallel-size 1"),
        (
            tied and parallel.pipeline_parallel_size > 1,
            "embedding and head are tied across pipeline stages",
            "use --pipeline-parallel-size 1",
        ),
        (
            model.is_hybrid,
            "requests have recurrent states, and what the kv policies make of those is not known",
            "such a model can be planned and converted, not streamed",
        ),
        (model.enable_sleep_mode, "sleep mode drops weights", "leave out --enable-sleep-mode"),
    )
    for refused, what, remedy in refusals:
        if refused:
            raise LiveModelError(f"this engine cannot be patched in place: {what}; {remedy}")


def refuse_counting(vllm_config: Any) -> None:
    """What keeps the use of experts from being counted."""
    if compat.returns_experts(vllm_config):
        raise LiveModelError(
            "use of experts cannot be counted, vLLM watches the routers: leave out --enable-return-routed-experts"
        )


def refuse_modules(model: torch.nn.Module) -> None:
    """Layers whose live weights have a private layout."""
    for name, module in model.named_modules():
        if compat.is_adapted(module):
            raise LiveModelError(f"{name} is wrapped by LoRA and cannot be patched in place; leave out --enable-lora")
        if not compat.is_experts(module):
            continue
        backend = compat.moe_backend(module)
        if backend not in PATCHABLE_MOE:
            raise LiveModelError(
                f"{name} uses the MoE backend {backend}, whose weights have a private layout; "
                f"patchable are {', '.join(PATCHABLE_MOE)}: serve with --moe-backend triton"
            )


def refuse_derived(model: torch.nn.Module, rank: int) -> None:
    """Tensors beside the parameters that may have been computed from them: no commit would write them."""
    absorbed = [tensor for layer in compat_mla.packing_layers(model).values() for tensor in compat_mla.packed(layer)]
    written = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *absorbed) if tensor.numel()}
    for prefix, module in model.named_modules():
        for name, tensor in compat_mla.apart(module):
            what = "is computed from kv_b_proj in memory of its own"
            raise LiveModelError(_stale(f"{prefix}.{name} {_held(tensor)}", rank, what))
        if name := compat_tensors.made_later(module):
            raise LiveModelError(_stale(f"{prefix}.{name}", rank, "is made of weights in the first step"))
        for path, tensor in compat_tensors.unexplained(module):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in written:
                name = ".".join(filter(None, (prefix, path)))
                twin = _twin(module, tensor)
                what = f"may be {f'a copy of {prefix}.{twin}' if twin else 'computed from weights'}"
                raise LiveModelError(_stale(f"{name} {_held(tensor)}", rank, what))


def _held(tensor: torch.Tensor) -> str:
    return f"({tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')})"


def _stale(name: str, rank: int, what: str) -> str:
    return (
        f"{name} on engine rank {rank} is no parameter that is loaded and {what}: it would stay as it is when a "
        "version is committed; serve without what makes it"
    )


def _twin(module: torch.nn.Module, tensor: torch.Tensor) -> str:
    """The parameter of a module that has this shape, as the loader fills it; empty when there is none."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
    shapes |= {name: meta.shape for name, meta in compat.loader_metadata(module).items()}
    return next((name for name, shape in shapes.items() if shape == tensor.shape), "")


def refuse_buffer(buffer: LiveBuffer, rank: int) -> None:
    """A live parameter that is not what the loader fills."""
    live = buffer.parameter
    if live.numel() == 0 and isinstance(buffer, PackedLinear | Absorbed):
        return
    if tuple(live.shape) != buffer.shape or not live.is_contiguous():
        raise LiveModelError(
            f"{buffer.name} on engine rank {rank} is live as {tuple(live.shape)}, but the loader fills {buffer.shape}: "
            "padded or repacked weights cannot be patched in place; choose a TP size that needs no padding, or EP"
        )
