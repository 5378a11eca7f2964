"""Everything that depends on one megatron-core version: the supported range, the CPU shims, its private attributes.

No other file of this package touches an attribute of megatron-core that its documentation does not name. Written
against 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch._dynamo.config
from torch.overrides import TorchFunctionMode

MEGATRON_CORE_MIN = "0.16.1"
MEGATRON_CORE_BELOW = "0.20"
"""The range of versions.env, which an installed package does not carry; a test holds the two equal."""

_ON_CUDA = torch.cuda.is_available()
_thread = threading.local()


class UnsupportedTrainer(ValueError):
    """A library version or a trainer setting that this package was not written for. Says which ones it was."""


def check_version(installed: str | None = None) -> str:
    """The installed megatron-core version; UnsupportedTrainer with the supported range when it lies outside."""
    if installed is None:
        try:
            installed = metadata.version("megatron-core")
        except metadata.PackageNotFoundError as error:
            raise UnsupportedTrainer(f"megatron-core is not installed; {_range()}") from error
    if not _numbers(MEGATRON_CORE_MIN) <= _numbers(installed) < _numbers(MEGATRON_CORE_BELOW):
        raise UnsupportedTrainer(f"megatron-core {installed} is not supported; {_range()}")
    return installed


def _range() -> str:
    return f"install a version >= {MEGATRON_CORE_MIN} and < {MEGATRON_CORE_BELOW}"


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 16, 1) for "0.16.1rc0+local": a candidate counts as its release."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)


# ---- shims -----------------------------------------------------------------------------------------------------


def install() -> str:
    """Checks the version, makes megatron-core run on this machine, returns the device type "cpu" or "cuda".

    Call it on every thread that runs megatron code, before the first megatron object is made. Idempotent.
    """
    check_version()
    _define_te_general_gemm()
    if _ON_CUDA:
        return "cuda"
    _install_on_cpu()
    # Megatron's fused helpers are compiled functions; run as written they need no C++ compiler and no warm-up.
    torch._dynamo.config.disable = True
    if not getattr(_thread, "mode", None):
        _thread.mode = _CudaMeansCpu()
        _thread.mode.__enter__()
    return "cpu"


def _define_te_general_gemm() -> None:
    """0.16 without TransformerEngine, on GPU too: a failed import leaves the name undefined (moe_utils.py:1192)."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _install_on_cpu() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    cpu, stream = torch.device("cpu"), _NullStream()
    # Buffers, point-to-point receives, tensor-parallel mappings and the router ask for the current device.
    torch.cuda.current_device = lambda: cpu
    # The alltoall dispatcher, and from 0.19 on every gradient reduction, orders streams.
    torch.cuda.current_stream = lambda device=None: stream
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_on_cpu
    # fork() becomes a null context: exact as long as dropout is 0, which `model` enforces.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    # Activation recompute saves the CUDA generator's state; here there is none.
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: None
    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None


def _split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's helper leaves CPU tensors alone, and torch.distributed then refuses them as split sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _NullStream:
    """Stands for the compute stream, for the dispatcher's copy stream and for its event."""

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def synchronize(self) -> None: ...


class _CudaMeansCpu(TorchFunctionMode):
    """On the thread that entered it: device "cuda" is the CPU, no memory is pinned, and type names say `torch.cuda.*`.

    Megatron's optimizer tells fp32 from bf16 masters by type names and makes its scalars on "cuda".
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):  # positions under context parallelism
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


# ---- private attributes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DdpBucket:
    """One param/grad bucket of megatron's DDP. `data` is flat, in model dtype; `params` are (param, start, end).

    Rank r of `group` owns the r-th of `group.size()` equal slices of `data`: it steps them, and its bytes are final
    before everybody else's. `grads` are the main gradients of the same elements; a reduction multiplies each replica's
    by `grad_scale` and combines them with `reduce_op`.
    """

    name: str
    data: torch.Tensor
    params: tuple[tuple[torch.nn.Parameter, int, int], ...]
    group: torch.distributed.ProcessGroup
    grads: torch.Tensor
    grad_scale: float
    reduce_op: Any


@dataclass(frozen=True)
class MainShard:
    """What this rank's optimizer holds of one parameter: fp32 `main` is elements [start, end) of the DDP bucket.

    `member` is the DistributedOptimizer it belongs to, `group_index` the place of its group in the inner optimizer.
    """

    param: torch.nn.Parameter
    main: torch.Tensor
    start: int
    end: int
    member: Any
    group_index: int

    @property
    def group(self) -> dict[str, Any]:
        """The group as it is now: loading a state replaces all of them."""
        group: dict[str, Any] = self.member.optimizer.param_groups[self.group_index]
        return group


def ddp_buckets(chunks: Sequence[Any]) -> Iterator[DdpBucket]:
    """All buckets of this rank, in an order that is the same on all ranks of a bucket's group."""
    for number, chunk in enumerate(chunks):
        for kind, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
            for index, buffer in enumerate(buffers):
                for bucket in buffer.buckets:
                    name = f"c{number}.{kind}{index}.b{bucket.bucket_id}"
                    yield _ddp_bucket(name, buffer, bucket)


def _ddp_bucket(name: str, buffer: Any, bucket: Any) -> DdpBucket:
    # bucket.param_to_index leaves the padding out in 0.16; the buffer's own map is right in every version.
    spans = [(param, *buffer.param_index_map[param][:2]) for param in bucket.params_list]
    params = sorted(((p, start - bucket.offset, end - bucket.offset) for p, start, end in spans), key=lambda s: s[1])
    average = buffer.ddp_config.average_in_collective
    return DdpBucket(
        name,
        bucket.param_data,
        tuple(params),
        buffer.data_parallel_group,
        bucket.grad_data,
        bucket.gradient_scaling_factor,
        torch.distributed.ReduceOp.AVG if average else torch.distributed.ReduceOp.SUM,
    )


def members(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers of a chain (dense, experts) that hold parameters on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in chained if not getattr(member, "is_stub_optimizer", False)]


def main_shards(optimizer: Any) -> Iterator[MainShard]:
    """Every shard that this rank steps."""
    for member in members(optimizer):
        columns = (
            range(len(member.optimizer.param_groups)),
            member.model_fp32_groups,
            member.shard_fp32_groups,
            member.model_float16_groups,
            member.shard_fp32_from_float16_groups,
        )
        for index, model32, shard32, model16, shard16 in zip(*columns, strict=True):
            for param, main in (*zip(model32, shard32, strict=True), *zip(model16, shard16, strict=True)):
                span = member._get_model_param_range_map(param)["gbuf_world_in_bucket"]
                yield MainShard(param, main, span.start, span.end, member, index)


def routers_with_bias(chunk: Any) -> Iterator[tuple[str, Any]]:
    """(name of the bias in its chunk, router) of every router with a bias for the choice of experts, in layer order.

    The bias is fp32 from now on, and stays where it is: megatron's 16-bit wrapper casts it, and the first forward or
    save would cast it back into another tensor.
    """
    for name, module in chunk.named_modules():
        if getattr(module, "expert_bias", None) is not None:
            module._maintain_float32_expert_bias()
            yield f"{name}.expert_bias", module


def stock_step(optimizer: Any, norm: Any) -> None:
    """Megatron's own `step()` of gradients whose `norm` it has just given: it is not computed a second time."""
    optimizer.get_grad_norm = lambda: norm
    try:
        made, _, _ = optimizer.step()
    finally:
        del optimizer.get_grad_norm
    if not made:
        raise UnsupportedTrainer(f"megatron skips a step at a gradient norm of {float(norm):g}; no policy knows why")


def forget_moments(optimizer: Any) -> None:
    """As if the optimizer had never stepped. The fp32 masters stay; `MegatronAdapter.load_hf` sets them."""
    for member in members(optimizer):
        member.optimizer.state.clear()
        for group in member.optimizer.param_groups:
            group.pop("step", None)  # FusedAdam counts here


def has_transformer_engine() -> bool:
    """Whether megatron-core can use TransformerEngine here (never on a CPU)."""
    from megatron.core.extensions import transformer_engine

    return _ON_CUDA and bool(getattr(transformer_engine, "HAVE_TE", False))
