"""Every setting of Megatron's that is refused, row by row: also those that only newer versions have."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.trainer import compat, compat_grads, refusals
from megastream.trainer.compat import UnsupportedTrainer
from megastream.trainer.gpt import transformer_config
from tests.helpers.tiny import tiny_glm4

MODEL, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"
ALWAYS = {
    MODEL: (refusals._MODEL, refusals._MODEL_ONLY),
    DDP: (refusals._DDP, refusals._DDP_ONLY),
    OPTIMIZER: (refusals._OPTIMIZER, refusals._OPTIMIZER_ONLY),
}
IN_BACKWARD = {MODEL: compat_grads._NOT_IN_BACKWARD, DDP: compat_grads._NOT_WITH_OWN_REDUCTION}
ROWS = [(owner, row[0]) for owner, tables in ALWAYS.items() for table in tables for row in table]
STREAMED_ROWS = [(owner, row[0]) for owner, table in IN_BACKWARD.items() for row in table]
VALUES: dict[str, Any] = {
    "fp8": "e4m3",
    "fp4": "e2m1",
    "loss_scale": 128.0,
    "optimizer": "muon",
    "grad_norm_skip_threshold": 5.0,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 2,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "moe_mlp_glu_interleave_size": 32,
    "moe_shared_expert_glu_interleave_size": 32,
}
"""What a row refuses where that is not True."""


def settings(**changed: Any) -> dict[str, SimpleNamespace]:
    """What megatron-core 0.19.2 has where nobody sets anything else, as far as rows name it; `changed` by owner."""
    fine = {
        MODEL: dict(fp8=None, gtp_weight_remat_size=1, moe_router_load_balancing_type="aux_loss"),
        DDP: dict(use_distributed_optimizer=True, num_distributed_optimizer_instances=1),
        OPTIMIZER: dict(optimizer="adam", grad_norm_skip_threshold=math.inf, optimizer_cuda_graph=False),
    }
    return {owner: SimpleNamespace(**{**named, **changed.get(owner, {})}) for owner, named in fine.items()}


def refuse(finality: str = "", **changed: Any) -> None:
    made = settings(**changed)
    chunks = [SimpleNamespace(config=made[MODEL], ddp_config=made[DDP])]
    refusals.refuse_unsupported(chunks, SimpleNamespace(config=made[OPTIMIZER]))
    if finality:
        compat_grads.refuse_streamed_gradients(chunks, finality)


def test_nothing_is_refused_where_nothing_is_set() -> None:
    refuse("early")


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_a_setting_is_refused_in_one_line_with_reason_and_remedy(owner: str, name: str) -> None:
    value = VALUES.get(name, True)
    with pytest.raises(UnsupportedTrainer) as error:
        refuse(**{owner: {name: value}})
    said = str(error.value)
    assert said.startswith((f"{owner}.{name}={value} is not supported: ", f"{owner}.{name}={value!r} is not"))
    assert "; " in said and "\n" not in said


@pytest.mark.parametrize(("owner", "name"), STREAMED_ROWS)
def test_a_setting_is_refused_where_gradients_are_streamed(owner: str, name: str) -> None:
    refuse(**{owner: {name: True}})
    with pytest.raises(UnsupportedTrainer, match=f"{owner}.{name}=True is not supported with finality 'early': .*;"):
        refuse("early", **{owner: {name: True}})


def test_a_replayed_graph_is_refused_where_gradients_are_streamed() -> None:
    with pytest.raises(UnsupportedTrainer, match="cuda_graph_impl='local' is not supported with finality 'early'"):
        refuse("early", **{MODEL: {"cuda_graph_impl": "local"}})


@pytest.mark.parametrize("setting", [{"cp": 2}, {"mtp_layers": 1}])
def test_what_was_never_run_on_transformer_engine_is_refused_there(
    setting: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = setting.items()
    assert transformer_config(tiny_glm4(**setting), "cpu").num_layers == 4, "elsewhere it is not"
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    assert transformer_config(tiny_glm4(), "cpu").moe_grouped_gemm, "and there nothing else is"
    with pytest.raises(
        UnsupportedTrainer, match=f"{name}={value} is not supported with TransformerEngine: .* never run "
    ):
        transformer_config(tiny_glm4(**setting), "cpu")


def test_routing_by_a_bias_that_no_table_has_is_refused() -> None:
    with pytest.raises(UnsupportedTrainer, match="load_balancing_type=quantile_balancing is not supported: .*another"):
        refuse(**{MODEL: {"moe_router_load_balancing_type": "quantile_balancing"}})
    refuse(**{MODEL: {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}})


def test_rows_that_nothing_else_would_miss() -> None:
    """Settings under which a step or a name would be another one than stock's, without a word."""
    named = {name for _, name in ROWS}
    assert named >= {
        "fp16",
        "loss_scale",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "optimizer_cuda_graph",
        "grad_norm_skip_threshold",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "fp8_param_gather",
        "fp4_param_gather",
        "fp8",
        "fp4",
        "gtp_weight_remat_size",
        "expert_gtp_weight_remat_size",
        "mtp_detach_heads",
        "mtp_use_repeated_layer",
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
    }
    streamed = {name for _, name in STREAMED_ROWS}
    assert streamed >= {
        "calculate_per_token_loss",
        "defer_embedding_wgrad_compute",
        "delay_wgrad_compute",
        "overlap_moe_expert_parallel_comm",
        "overlap_dispatch_backward_with_experts_wgrad",
        "check_for_large_grads",
        "reduce_scatter_with_fp32_accumulation",
    }
