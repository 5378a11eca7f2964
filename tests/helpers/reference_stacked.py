"""Experts whose checkpoint stacks them, transposed, with gate and up in turns (GPT-OSS), cut by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.helpers.reference_blocks import (
    Arrays,
    Config,
    Dims,
    EngineRank,
    expert_name,
    local_experts,
    num_experts,
    part,
)


@dataclass(frozen=True)
class StackedExperts:
    """GPT-OSS: [experts, in, out] with gate in the even and up in the odd columns, and a bias for each."""

    def tensors(self, c: Config) -> Dims:
        count, hidden, ffn = num_experts(c), c["hidden_size"], c["intermediate_size"]
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * ffn),
            "mlp.experts.gate_up_proj_bias": (count, 2 * ffn),
            "mlp.experts.down_proj": (count, ffn, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        params = {"mlp.router.weight": w["mlp.router.weight"], "mlp.router.bias": w["mlp.router.bias"]}
        cut = at["etp"], at["etp_size"]
        for expert in local_experts(c, at):
            for what, suffix in (("weight", ""), ("bias", "_bias")):
                both = w[f"mlp.experts.gate_up_proj{suffix}"][expert]
                halves = [part(both[..., half::2].T, *cut) for half in (0, 1)]
                params[expert_name("linear_fc1", what, expert, te)] = np.concatenate(halves)
            params[expert_name("linear_fc2", "weight", expert, te)] = part(
                w["mlp.experts.down_proj"][expert].T, *cut, 1
            )
            params[expert_name("linear_fc2", "bias", expert, te)] = w["mlp.experts.down_proj_bias"][expert]
        return params

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        """Rows of gate and up in turns; the bias behind the sum is the first rank's, zeros elsewhere (NaN here)."""
        experts, bias = w["mlp.experts.gate_up_proj"], w["mlp.experts.down_proj_bias"][at.experts]
        return {
            "mlp.router.weight": w["mlp.router.weight"],
            "mlp.router.bias": w["mlp.router.bias"],
            "mlp.experts.routed_experts.w13_weight": np.stack([part(experts[e], *at.cut, 1).T for e in at.experts]),
            "mlp.experts.routed_experts.w13_bias": np.stack(
                [part(w["mlp.experts.gate_up_proj_bias"][e], *at.cut) for e in at.experts]
            ),
            "mlp.experts.routed_experts.w2_weight": np.stack(
                [part(w["mlp.experts.down_proj"][e], *at.cut).T for e in at.experts]
            ),
            "mlp.experts.routed_experts.w2_bias": bias if at.cut[0] == 0 else np.full_like(bias, np.nan),
        }
