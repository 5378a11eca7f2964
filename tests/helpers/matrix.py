"""The features and layouts that steps are compared with stock over, and a pairwise covering set of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from megastream.trainer.config import TrainerConfig
from tests.helpers.tiny import tiny_config, tiny_qwen2

FACTORS: dict[str, tuple[str, ...]] = {
    "model": ("qwen3", "qwen2"),
    "dtype": ("fp32", "bf16"),
    "dp": ("dp1", "dp2", "dp4"),
    "tp": ("tp1", "tp2"),
    "cp": ("cp1", "cp2"),
    "pp": ("pp1", "pp2", "pp3"),
    "vpp": ("vpp1", "vpp2"),
    "ep": ("ep1", "ep2", "ep4"),
    "etp": ("etp1", "etp2"),
    "stages": ("even", "uneven", "ends"),
    "tied": ("untied", "tied"),
    "clip": ("clipped", "unclipped"),
    "recompute": ("none", "selective", "full"),
    "loss": ("microbatch", "token"),
    "reduce": ("late", "overlapped"),
    "dispatcher": ("allgather", "alltoall"),
}
"""`ends`: stages without decoder layers, the first has the embedding alone or the last norm and head alone."""

MAX_RANKS = 12

_STAGES: dict[tuple[int, int, str], tuple[int, ...]] = {
    (1, 1, "even"): (2,),
    (2, 1, "even"): (1, 1),
    (2, 1, "uneven"): (2, 1),
    (2, 1, "ends"): (0, 2),
    (2, 2, "even"): (1, 1, 1, 1),
    (2, 2, "uneven"): (2, 1, 1, 0),
    (2, 2, "ends"): (0, 1, 2, 0),
    (3, 1, "even"): (1, 1, 1),
    (3, 1, "uneven"): (1, 2, 1),
    (3, 1, "ends"): (1, 2, 0),
    (3, 2, "even"): (1, 1, 1, 1, 1, 1),
    (3, 2, "uneven"): (1, 2, 1, 1, 1, 0),
    (3, 2, "ends"): (0, 1, 2, 1, 1, 0),
}
"""Layers of every stage by pp, vpp and kind; even ones are left to Megatron."""

Case = Mapping[str, str]


def number(case: Case, axis: str) -> int:
    """The size of an axis: 2 for "dp2"."""
    return int(case[axis].removeprefix(axis))


def ranks(case: Case) -> int:
    """Of the case's trainer."""
    return number(case, "dp") * number(case, "tp") * number(case, "cp") * number(case, "pp")


def is_possible(case: Case) -> bool:
    """Whether Megatron has this layout, on at most MAX_RANKS ranks."""
    within = number(case, "dp") * number(case, "tp") * number(case, "cp")
    staged = (number(case, "pp"), number(case, "vpp"), case["stages"]) in _STAGES
    return staged and within % (number(case, "etp") * number(case, "ep")) == 0 and ranks(case) <= MAX_RANKS


def config_of(case: Case) -> TrainerConfig:
    """The tiny model of a case, in its layout."""
    pp, vpp = number(case, "pp"), number(case, "vpp")
    stages = _STAGES[pp, vpp, case["stages"]]
    settings: dict[str, Any] = dict(
        layers=sum(stages),
        experts=8 if case["ep"] == "ep4" else 4,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[case["dtype"]],
        tp=number(case, "tp"),
        cp=number(case, "cp"),
        pp=pp,
        vpp=vpp,
        ep=number(case, "ep"),
        etp=number(case, "etp"),
        stage_layers=None if case["stages"] == "even" else stages,
        tied=case["tied"] == "tied",
        clip=0.3 if case["clip"] == "clipped" else 0.0,
        weight_decay=0.1,
        recompute=case["recompute"],
        per_token_loss=case["loss"] == "token",
        overlap_grad_reduce=case["reduce"] == "overlapped",
        ddp_bucket_elements=20_000,
        dispatcher=case["dispatcher"],
    )
    return (tiny_qwen2 if case["model"] == "qwen2" else tiny_config)(**settings)


def read(row: str) -> Case:
    """A case from its line, one value of every factor in order."""
    case = dict(zip(FACTORS, row.split(), strict=True))
    assert all(case[name] in values for name, values in FACTORS.items()), row
    return case


def pairs(case: Case) -> Iterator[tuple[str, str]]:
    """Every two values that the case brings together."""
    yield from combinations((case[name] for name in FACTORS), 2)


def possible_pairs() -> set[tuple[str, str]]:
    """Every two values that some possible layout brings together."""
    axes = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "stages")
    found: set[tuple[str, str]] = set()
    for values in product(*(FACTORS[axis] for axis in axes)):
        layout = dict(zip(axes, values, strict=True))
        if is_possible(layout):
            found.update(pair for pair in _pairs_with_free(layout))
    return found


def _pairs_with_free(layout: Case) -> Iterator[tuple[str, str]]:
    """Pairs of a layout's own values, and of those with everything that goes with any layout."""
    options = [(layout[name],) if name in layout else values for name, values in FACTORS.items()]
    for one, two in combinations(options, 2):
        yield from product(one, two)
