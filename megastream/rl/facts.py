"""What a checkpoint of `megastream train` says of its training, for the one that goes on from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megastream.rl.train_config import TrainConfig
from megastream.trainer.adapter import mesh_coords
from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint_types import Resumed
from megastream.trainer.config import TrainerConfig


@dataclass(frozen=True)
class Position:
    """Where a training goes on: `sequences` and `skipped` steps count from 0, `version` is the highest it published."""

    sequences: int
    skipped: int
    version: int

    @staticmethod
    def of(resumed: Resumed) -> Position:
        """AgreedError, equal on all ranks, when the checkpoint does not say."""
        found = {field.name: resumed.state.get(field.name) for field in fields(Position)}
        for name, value in found.items():
            if not isinstance(value, int):
                raise AgreedError(
                    f"checkpoint {resumed.path}: state.{name} of its manifest.json is {value!r}, an integer is wanted: "
                    f"it does not say where to go on; with checkpoint.weights_only it begins a new training"
                )
        return Position(**found)  # type: ignore[arg-type]


def facts_of(config: TrainConfig, settings: TrainerConfig) -> dict[str, Any]:
    """What a resumed training must share; JSON data."""
    names = (
        "layers mtp_layers hidden heads kv_groups head_dim experts top_k expert_ffn vocab tied qk_norm qkv_bias "
        "norm_top_k shared_ffn shared_gate dense_layers dense_ffn router_expert_bias router_scale rope_theta rope_part "
        "norm_eps dtype"
    )
    optimizer = {name: getattr(config.optimizer, name) for name in config.optimizer.__struct_fields__}
    return {
        "model": {name: getattr(settings, name) for name in names.split()},
        "optimizer": optimizer,
        "batch": {"global_sequences": config.batch.global_sequences, "per_token_loss": config.batch.per_token_loss},
        "run": {"seed": config.run.seed},
    }


def layout_of(config: TrainConfig) -> dict[str, Any]:
    """How the training is cut, which may change: in what order it sums up; JSON data. Only with ranks that have met.

    Where all of it is the same a resumed training is the one that was never interrupted, bit for bit. `finality` is
    part of it: gradients of more than two replicas are summed in another order under some.
    """
    layout = config.layout
    return {
        **{name: size for name, size in mesh_coords().items() if name.endswith("_size")},
        "vpp_size": layout.vpp or 1,
        "stage_layers": list(layout.stage_layers or ()),
        "recompute": layout.recompute,
        "dispatcher": layout.dispatcher,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "micro_sequences": config.batch.micro_sequences,
        "bucket_elements": config.bucket_elements,
        "finality": config.finality,
    }
