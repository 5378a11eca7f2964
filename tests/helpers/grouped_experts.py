"""GroupedMLP's two parameters of a rank, said element by element. Nothing of ours decides what lies where.

megatron-core 0.16.1, `GroupedMLP.forward`: `weight1.view(experts, hidden, -1)` and `weight2.view(experts, -1, hidden)`
stand behind the tokens in a product, and of its output the first half is the gate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight")


def with_grouped(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a rank with those of SequentialMLP's experts packed, in the order of their numbers."""
    others: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in params.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
        else:
            others[name] = tensor
    for (prefix, which), held in experts.items():
        linears = [held[number] for number in sorted(held)]
        others[f"{prefix}weight{which}"] = weight1(linears) if which == "1" else weight2(linears)
    return others


def weight1(linears: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of linears [gate and up, hidden]: expert e, input h and output o at (e * hidden + h) * outputs + o."""
    outputs, hidden = linears[0].shape
    flat = [float("nan")] * (len(linears) * hidden * outputs)
    for e, linear in enumerate(linears):
        for o, row in enumerate(linear.tolist()):
            for h, value in enumerate(row):
                flat[(e * hidden + h) * outputs + o] = value
    return torch.tensor(flat, dtype=linears[0].dtype).view(hidden, len(linears) * outputs)


def weight2(linears: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of linears [hidden, ffn]: expert e, input f and output h at (e * ffn + f) * hidden + h."""
    hidden, ffn = linears[0].shape
    flat = [float("nan")] * (len(linears) * ffn * hidden)
    for e, linear in enumerate(linears):
        for h, row in enumerate(linear.tolist()):
            for f, value in enumerate(row):
                flat[(e * ffn + f) * hidden + h] = value
    return torch.tensor(flat, dtype=linears[0].dtype).view(len(linears) * ffn, hidden)
