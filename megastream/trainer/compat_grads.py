"""Takes gradient reduction out of megatron's hands: the private attributes of DDP and of the schedules that this needs.

Written against 0.16.1 and 0.19.2, like `compat`, and the only other file that touches such attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megastream.trainer.compat import UnsupportedTrainer

OnGrad = Callable[[torch.nn.Parameter], None]
"""Called each time a parameter's gradient was added to its main gradient during a last microbatch."""


class GradTakeover:
    """While it lives, megatron reduces no gradient of these chunks: it says when they are there, and who asks for them.

    `on_grad` runs inside the backward of a chunk's last microbatch, on the thread of autograd, after megatron's own
    hook. `on_finish` runs when `finalize_model_grads` wants every gradient reduced, once per step, before it couples
    gradients between ranks. UnsupportedTrainer when another takeover of the same chunks was not released.
    """

    def __init__(self, chunks: Sequence[Any], on_grad: OnGrad, on_finish: Callable[[], None]) -> None:
        self._chunks, self._on_grad, self._on_finish = list(chunks), on_grad, on_finish
        self._last_microbatch = self._finished = False
        self._config = chunks[0].config
        self._no_sync = self._config.no_sync_func
        groups = [group for chunk in chunks for group in _bucket_groups(chunk)]
        if any("finish_grad_sync" in vars(group) for group in groups):
            raise UnsupportedTrainer("gradients of this model are already streamed by another stepper; close it first")
        for group in groups:
            group.start_grad_sync = _nothing
            group.finish_grad_sync = self._finish_of(group)
        self._groups = groups
        watched = [self._watched(chunk.no_sync) for chunk in chunks]
        self._config.no_sync_func = watched if len(chunks) > 1 else watched[0]
        # An accumulator lives as long as somebody holds it; DDP's own hook was put on it first and runs first.
        self._accumulators = [_accumulator(param) for chunk in chunks for param in _trained(chunk)]
        self._hooks = [node.register_hook(self._hook_of(param)) for param, node in self._accumulators]

    def next_step(self) -> None:
        """The step that was prepared has been made; the next one begins with gradients that are not there."""
        self._last_microbatch = self._finished = False

    @property
    def finished(self) -> bool:
        """Whether `finalize_model_grads` has asked for the gradients of this step."""
        return self._finished

    def release(self) -> None:
        """Gives reduction back to megatron. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            del group.start_grad_sync, group.finish_grad_sync
        if self._groups:
            self._config.no_sync_func = self._no_sync
        self._hooks, self._groups, self._accumulators = [], [], []

    def _hook_of(self, param: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._last_microbatch:
                self._on_grad(param)

        return hook

    def _finish_of(self, group: Any) -> Callable[..., None]:
        def finish(force_all_reduce: bool = False) -> None:
            if force_all_reduce:
                raise UnsupportedTrainer("force_all_reduce is not supported with streamed gradients; leave it out")
            group.param_gather_dispatched = False
            if not self._finished:
                self._finished = True
                self._on_finish()

        return finish

    def _watched(self, no_sync: Callable[[], Any]) -> Callable[[], Any]:
        """The schedules leave this context for the last microbatch of a chunk, in every version."""

        @contextmanager
        def watched() -> Iterator[None]:
            self._last_microbatch = False
            with no_sync():
                yield
            self._last_microbatch = True

        return watched


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a bucket's own reduction."""


def check_local_grads(chunks: Sequence[Any], name: str, grads: torch.Tensor) -> None:
    """What stock does before it reduces, with `check_for_nan_in_grad`: gradients that are not finite end the training.

    RuntimeError, from megatron's own check, names the rank and the bucket. Without that setting nothing is looked at.
    From `_ParamAndGradBucketGroup.check_grads`.
    """
    if not chunks[0].ddp_config.check_for_nan_in_grad:
        return
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    norm = grads.norm(p=2)
    for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=norm,
            rejection_func=rejects,
            message=f"found {what} in local grad norm for bucket {name} in backward pass before its reduction",
            tolerance=0.001,  # as stock
            fatal=True,
        )


def _bucket_groups(chunk: Any) -> list[Any]:
    groups: list[Any] = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    return groups


def _trained(chunk: Any) -> Iterator[torch.nn.Parameter]:
    return (param for param in chunk.parameters() if param.requires_grad)


def _accumulator(param: torch.nn.Parameter) -> tuple[torch.nn.Parameter, Any]:
    with torch.enable_grad():
        return param, param.expand_as(param).grad_fn.next_functions[0][0]


# ---- what finalize_model_grads changes after the reduction over data-parallel replicas -------------------------


def late_params(chunks: Sequence[Any]) -> set[torch.nn.Parameter]:
    """Parameters whose gradients `finalize_model_grads` still changes: final only after it.

    Embeddings that two stages hold (tied, or used by MTP) are summed over both; norms, and what else each tensor-
    parallel rank sees a part of the sequence for, are summed over TP (finalize_model_grads.py).
    """
    from megatron.core import parallel_state as mesh

    late = set()
    tp, pp = mesh.get_tensor_model_parallel_world_size(), mesh.get_pipeline_model_parallel_world_size()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if (pp > 1 and _over_stages(param)) or (tp > 1 and _over_tensor_ranks(name, param, chunk.config)):
                late.add(param)
        if pp > 1:
            late |= _shared_embedding(chunk)
    return late


def _over_stages(param: torch.nn.Parameter) -> bool:
    """Copies of one parameter on several stages."""
    marks = ("shared_embedding", "pipeline_parallel", "flextron_router_pp_sync")
    return any(getattr(param, mark, False) for mark in marks)


def _over_tensor_ranks(name: str, param: torch.nn.Parameter, config: Any) -> bool:
    if getattr(param, "average_gradients_across_tp_domain", False):
        return True
    if config.sequence_parallel and getattr(param, "sequence_parallel", False):
        return True
    return bool(config.qk_layernorm) and ("q_layernorm" in name or "k_layernorm" in name)


def _shared_embedding(chunk: Any) -> set[torch.nn.Parameter]:
    model = chunk
    while hasattr(model, "module"):  # DDP, then the 16-bit wrapper
        model = model.module
    if not (model.share_embeddings_and_output_weights or getattr(chunk.config, "mtp_num_layers", 0)):
        return set()
    weight = model.shared_embedding_or_output_weight() if model.pre_process or model.post_process else None
    return set() if weight is None else {weight}


# ---- refusals --------------------------------------------------------------------------------------------------

_NOT_IN_BACKWARD = (
    ("calculate_per_token_loss", "gradients are scaled by a token count that is known after the backward only"),
    ("defer_embedding_wgrad_compute", "the embedding's gradient comes after the backward"),
    ("delay_wgrad_compute", "gradients come after the hooks that announce them"),
    ("overlap_moe_expert_parallel_comm", "gradients come after the hooks that announce them"),
    ("overlap_dispatch_backward_with_experts_wgrad", "gradients come after the hooks that announce them"),
    ("enable_cuda_graph", "a replayed graph runs no hooks"),
    ("external_cuda_graph", "a replayed graph runs no hooks"),
    ("grad_sync_func", "only the first stage would be told of its last microbatch"),
)
_NOT_WITH_OWN_REDUCTION = (
    ("check_for_large_grads", "megatron does it in the reduction that is replaced"),
    ("reduce_scatter_with_fp32_accumulation", "megatron does it in the reduction that is replaced"),
    ("param_name_patterns_for_fp32_local_accumulation", "main gradients lie outside the buffer"),
    ("delay_wgrad_compute", "gradients come after the hooks that announce them"),
)


def refuse_streamed_gradients(chunks: Sequence[Any], finality: str) -> None:
    """UnsupportedTrainer names the setting under which a gradient is not complete when its hook runs."""
    for owner, config, table in (
        ("TransformerConfig", chunks[0].config, _NOT_IN_BACKWARD),
        ("DistributedDataParallelConfig", chunks[0].ddp_config, _NOT_WITH_OWN_REDUCTION),
    ):
        for name, reason in table:
            if value := getattr(config, name, None):
                raise UnsupportedTrainer(
                    f"{owner}.{name}={value} is not supported with finality {finality!r}: {reason}; "
                    f"switch it off or use 'pipelined'"
                )
    graphs = getattr(chunks[0].config, "cuda_graph_impl", "none")
    if graphs not in (None, "none"):
        raise UnsupportedTrainer(
            f"TransformerConfig.cuda_graph_impl={graphs!r} is not supported with finality {finality!r}: a replayed "
            f"graph runs no hooks; set it to 'none' or use 'pipelined'"
        )
