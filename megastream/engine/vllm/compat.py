"""Everything of vLLM that is not public and that megastream touches, behind small functions.

The only such files are this one (model and worker), `compat_tensors.py` (what modules hold beside their parameters),
`compat_mla.py` (what latent attention makes of its weights), `compat_core.py` (engine core), `compat_front.py` (answers
and HTTP), `compat_metrics.py` (/metrics) and `cpu_repairs.py`.

Supported are 0.26.0 <= version < 0.33. The tests run 0.32 on CPU, and by hand 0.26 on GPUs (tools/gpu_check.sh); the
versions between are not run. Where the two differ, the function here hides it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import vllm

from megastream.engine.supported import numbers_of, unsupported

logger = logging.getLogger("vllm.megastream")


class UnsupportedVersion(ValueError):
    """vLLM is outside the supported range. Names both."""


def version() -> tuple[int, int, int]:
    """The release numbers of the installed vLLM, e.g. (0, 32, 0) for `0.32.0+cpu`."""
    return numbers_of(version_text())


def version_text() -> str:
    """The installed vLLM's own version string."""
    return str(vllm.__version__)


def check_version() -> None:
    """Raises UnsupportedVersion outside the supported range."""
    if problem := unsupported(version_text()):
        raise UnsupportedVersion(problem)


def is_cpu() -> bool:
    """True on vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def dev_mode() -> bool:
    """True when vLLM serves its development endpoints (VLLM_SERVER_DEV_MODE)."""
    import vllm.envs

    return bool(vllm.envs.VLLM_SERVER_DEV_MODE)


def rust_front_end() -> bool:
    """True when vLLM's HTTP server is not Python, and no plugin is loaded in it (0.32)."""
    import vllm.envs

    return bool(getattr(vllm.envs, "VLLM_USE_RUST_FRONTEND", False))


# -- weight transfer ---------------------------------------------------------------------------------------------------


def register_backend(name: str, module: str, class_name: str) -> None:
    """Adds a weight transfer backend; does nothing when it is there (plugins are loaded several times)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def selected_backend(vllm_config: Any) -> str | None:
    """The name given by --weight-transfer-config, or None."""
    config = vllm_config.weight_transfer_config
    return None if config is None else str(config.backend)


def transfer_engine(worker: Any) -> Any | None:
    """The weight transfer engine of a worker, None without one."""
    return getattr(worker, "weight_transfer_engine", None)


def rank_of(worker: Any) -> int:
    """A worker's rank in the engine's world."""
    return int(worker.rank)


def active_session(worker: Any, *, drop: bool = False) -> bool:
    """True between native start_weight_update and finish_weight_update; `drop` ends the session."""
    active = bool(getattr(worker, "_weight_update_active", False))
    if drop and active:
        worker._weight_update_active = False
    return active


def reload_checkpoint(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """vLLM's layerwise reload from HF tensors. Afterwards no parameter is left on the meta device, also after an error.

    A module of which only a part arrived then holds undefined values: after an error the model must not be used.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_processing,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        model.load_weights(tensors)
    finally:
        finalize_layerwise_processing(model, model_config)


# -- layout ------------------------------------------------------------------------------------------------------------


def loader_metadata(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Meta tensors of a module's own parameters as the weight loader saw them, before any repacking."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return dict(get_layerwise_info(module).restore_metadata[0])


def is_experts(module: torch.nn.Module) -> bool:
    """True for the module that owns the stacked expert weights (`w13_weight`, `w2_weight`)."""
    return "w13_weight" in module._parameters


def is_head(module: torch.nn.Module) -> bool:
    """True for the language model head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def is_adapted(module: torch.nn.Module) -> bool:
    """True for a layer that LoRA has wrapped."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return isinstance(module, BaseLayerWithLoRA)


def expert_slots(module: Any) -> tuple[int, ...]:
    """The global expert in each local slot, read from the live map (never recomputed)."""
    num_slots = int(module.w13_weight.shape[0])
    live_map = module.expert_map
    if live_map is None:
        return tuple(range(num_slots))
    slots = {int(slot): expert for expert, slot in enumerate(live_map.tolist()) if slot >= 0}
    return tuple(slots[slot] for slot in range(num_slots))


def moe_backend(module: Any) -> str:
    """Name of the unquantized MoE backend of an experts module, or the class of its quantization method."""
    method = module.quant_method
    backend = getattr(method, "unquantized_backend", None)
    return str(backend.name) if backend is not None else type(method).__name__


def expert_routers(model: torch.nn.Module) -> dict[int, tuple[str, Any | None]]:
    """Global layer -> name of its experts' runner, and the router that chooses them; None where a kernel does."""
    routers: dict[int, tuple[str, Any | None]] = {}
    for name, module in model.named_modules():
        experts: Any = getattr(module, "routed_experts", None)
        if experts is None:
            continue
        router = getattr(module, "router", None)
        is_inside = bool(getattr(experts.quant_method, "is_monolithic", False))
        layer = next(int(part) for part in name.split(".") if part.isdecimal())
        routers[layer] = (name, None if is_inside or not hasattr(router, "set_capture_fn") else router)
    return routers


def num_routed(router: Any) -> int:
    """Number of global experts that a router chooses from."""
    return int(router.global_num_experts)


def watch_router(router: Any, chosen: Callable[[torch.Tensor], None]) -> None:
    """Calls `chosen` with the global experts [tokens, top k] of every step, where the router chooses them."""
    router.set_capture_fn(chosen)


def cpu_moe_isa(module: Any) -> str | None:
    """Instruction set whose order the CPU experts are packed in; None when zentorch keeps the loader's layout."""
    experts = module.quant_method.moe_kernel.fused_experts
    return None if experts._use_zentorch else str(experts.isa)


def prepack_experts(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """A new tensor with the [experts, rows, columns] weight in the order of vLLM's CPU kernel."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight.contiguous(), isa)


CpuKernel = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""`kernel(x, weight, bias)`: x @ W.t() with W packed inside (oneDNN, AMX); some builds read `weight` instead."""


def pack_linear(weight: torch.Tensor) -> CpuKernel:
    """A new CPU kernel for `weight` [out, in], chosen by vLLM's own dispatch. It keeps no reference to `weight`.

    Some kernels keep a view of what they are made from (zentorch without prepacking); those get a copy of their own.
    """
    kernel = _dispatched(weight)
    return _dispatched(weight.clone()) if _keeps(kernel, weight) else kernel


def _dispatched(weight: torch.Tensor) -> CpuKernel:
    from vllm.model_executor.layers import utils

    stand_in: Any = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(stand_in, remove_weight=False)
    kernel: CpuKernel = stand_in.cpu_linear
    return kernel


def _keeps(kernel: CpuKernel, weight: torch.Tensor) -> bool:
    """True when a tensor that the kernel closes over lies in the memory of `weight`."""
    cells = [cell.cell_contents for cell in getattr(kernel, "__closure__", None) or ()]
    storage = weight.untyped_storage().data_ptr()
    return any(isinstance(held, torch.Tensor) and held.untyped_storage().data_ptr() == storage for held in cells)


def packed_linear(module: Any) -> CpuKernel | None:
    """The CPU kernel that a layer multiplies with, None on other platforms."""
    return getattr(module, "cpu_linear", None)


def set_packed_linear(module: Any, kernel: CpuKernel) -> None:
    """Makes `kernel` the one that the layer's next forward uses; the old one is freed."""
    module.cpu_linear = kernel


def padded_rows(module: torch.nn.Module) -> int:
    """Rows of an embedding or a head, on this rank, that stand for no token; 0 for every other module."""
    shard = getattr(module, "shard_indices", None)
    if shard is None:
        return 0
    return int(shard.num_elements_padded - shard.num_org_elements - shard.num_added_elements)


def kv_block_bytes(vllm_config: Any) -> int:
    """Bytes of one KV block on this rank, all of its layers together; 0 before the cache is there."""
    num_blocks = int(vllm_config.cache_config.num_gpu_blocks or 0)
    held: dict[int, int] = {}  # layers can share memory
    for layer in vllm_config.compilation_config.static_forward_context.values():
        caches = getattr(layer, "kv_cache", None)
        for cache in caches if isinstance(caches, list | tuple) else (caches,):
            if isinstance(cache, torch.Tensor):
                held[cache.untyped_storage().data_ptr()] = cache.untyped_storage().nbytes()
    return sum(held.values()) // num_blocks if num_blocks else 0


def returns_experts(vllm_config: Any) -> bool:
    """True when requests are told which experts they were routed to, for which vLLM watches the routers."""
    return bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False))


def in_data_parallel(vllm_config: Any) -> bool:
    """True when several engine cores share one model."""
    return int(vllm_config.parallel_config.data_parallel_size) > 1


def data_parallel_index(vllm_config: Any) -> int:
    """Number of this engine core among those that one vLLM starts, also where they are independent of each other."""
    return int(getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_index", 0))
