"""A Qwen-MoE-shaped model on megatron-core, for people without a training script of their own.

`build` makes model chunks and optimizer from one typed config, `train_step` runs forward and backward of one step.
Both are called on every trainer rank, with the same config.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat
from megastream.trainer.config import TrainerConfig, check_layout
from megastream.trainer.gpt import gpt_stage, transformer_config


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch: `tokens` int64 [batch, sequence + 1]; `mask` [batch, sequence], 1 where a target counts."""

    tokens: torch.Tensor
    mask: torch.Tensor | None = None


def start_process_group(
    config: TrainerConfig, *, rank: int, world_size: int, init_method: str, deadline_s: float
) -> str:
    """Joins the trainer's own process group and megatron's mesh; returns the device type. Collective, blocking."""
    check_layout(config, world_size)
    compat.check_version()
    meet(rank=rank, world_size=world_size, init_method=init_method, deadline_s=deadline_s)
    return start_mesh(config, deadline_s=deadline_s)


def meet(*, rank: int, world_size: int, init_method: str, deadline_s: float) -> None:
    """Joins the trainer's own process group: from here on what is wrong on one rank can be the word of all of them.

    It knows nothing of the model, so that ranks can meet before they look at anything. Collective; blocks for
    `deadline_s` at most, which is also the deadline of every later collective.
    """
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=deadline_s),
    )


def start_mesh(config: TrainerConfig, *, deadline_s: float) -> str:
    """Megatron's mesh over the ranks that have met; returns the device type. Collective, blocking."""
    from megatron.core import parallel_state

    device = compat.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.virtual_stages,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        # A second gloo group per mesh axis would serve megatron's own checkpoints only.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=whole_minutes(deadline_s),
    )
    return device


def whole_minutes(seconds: float) -> int:
    """What megatron's groups are given: never less than the deadline, so that none of them ends before it."""
    return math.ceil(seconds / 60)


def build(config: TrainerConfig) -> tuple[list[Any], Any]:
    """Model chunks (one per virtual stage, in DDP) and the chained distributed optimizer of this rank.

    Needs `start_process_group` or megatron's own initialisation. Initial weights follow `seed`; experts of different
    EP ranks start equal, so real runs load a checkpoint (`MegatronAdapter.load_hf`).
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    check_layout(config, dist.get_world_size())
    device = compat.install()
    if device == "cuda":
        # Weights are drawn from megatron's own generators there; a second model starts where the first one did.
        model_parallel_cuda_manual_seed(config.seed)
    transformer = transformer_config(config, device)
    stages: Sequence[int | None] = range(config.virtual_stages) if config.virtual_stages else (None,)
    chunks = [_in_ddp(config, transformer, gpt_stage(config, transformer, stage, device)) for stage in stages]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            bf16=config.dtype == "bfloat16",
            params_dtype=getattr(torch, config.dtype),
            clip_grad=config.clip,
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    if config.overlap_grad_reduce:
        transformer.no_sync_func = [chunk.no_sync for chunk in chunks] if config.virtual_stages else chunks[0].no_sync
    return chunks, optimizer


def _in_ddp(config: TrainerConfig, transformer: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        bucket_size=config.ddp_bucket_elements,
    )
    chunk = DistributedDataParallel(transformer, ddp_config, model)
    chunk.broadcast_params()
    return chunk


def train_step(
    chunks: Sequence[Any],
    batches: Iterator[TokenBatch],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
) -> float | None:
    """Forward and backward of one step; gradients lie reduced in the DDP buffers afterwards.

    Returns this data-parallel replica's next-token loss on ranks of the last stage, None elsewhere: the mean of the
    microbatches' means, or with `per_token_loss` the mean over all tokens that count. Every rank calls it; ranks of
    one replica pass equal batches, `num_microbatches` of them. Blocks until the gradients are in.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    compat.install()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    several = len(chunks) > 1
    iterators = list(itertools.tee(batches, len(chunks)))
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    if not losses:
        return None
    loss, weight = (sum(float(entry[key]) for entry in losses) for key in ("loss", "weight"))
    return _over_sequence(loss) / _over_sequence(weight)


def _over_sequence(value: float) -> float:
    """Summed over the ranks that share a sequence."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return float(total)


def _forward(batches: Iterator[TokenBatch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    size, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    device = next(model.parameters()).device
    tokens = batch.tokens.to(device)
    counted = torch.ones(size, length, device=device) if batch.mask is None else batch.mask.to(device)
    ours, everyones = sequence_parts(length, device)
    ahead = (everyones[None] > ours[:, None])[None, None]
    mask = {"loss_mask": counted[:, ours]} if model.config.mtp_num_layers else {}
    losses = model(tokens[:, :-1][:, ours], ours[None].expand(size, -1), ahead, labels=tokens[:, 1:][:, ours], **mask)

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Megatron multiplies by the ranks of a sequence and then takes the mean of their gradients."""
        loss = (output.float() * counted[:, ours]).sum() / counted.sum()
        weight = torch.tensor(len(ours) / length)
        return loss, {"loss": loss.detach().clone(), "weight": weight}

    def summed_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Megatron divides the gradients by the step's number of tokens once all of them are summed up."""
        loss, count = (output.float() * counted[:, ours]).sum(), counted[:, ours].sum()
        return loss, count.int(), {"loss": loss.detach().clone(), "weight": count}

    return losses, summed_loss if model.config.calculate_per_token_loss else mean_loss


def sequence_parts(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that this rank computes, and those of all ranks of its sequence, one behind the other.

    Megatron cuts a sequence into 2*cp parts and gives rank r the parts r and 2*cp-1-r, so that all have as much to do.
    """
    from megatron.core import parallel_state

    positions, size = torch.arange(length, device=device), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return positions, positions
    parts = positions.view(2 * size, -1)
    ranks = [torch.cat([parts[rank], parts[2 * size - 1 - rank]]) for rank in range(size)]
    return ranks[parallel_state.get_context_parallel_rank()], torch.cat(ranks)
