"""How many decoder layers a pipeline stage of Megatron's has, from each way in which it lets one say so.

All of it ends in one form: the layers of each stage, or of each virtual one, in the order in which a token passes them.
"""

from __future__ import annotations

import re

_REPEATED = re.compile(r"\(([^)]+)\)\*([0-9]{1,5})(?![0-9])"), re.compile(r"(.)\*([0-9]{1,5})(?![0-9])")
"""A group, then a single letter, as megatron unrolls them."""
_MOST_LETTERS = 10_000


def pipeline_layout(text: str) -> tuple[int, ...]:
    """Stages of a `pipeline_model_parallel_layout`, letters with | between stages, e.g. `Ettt|(tt|)*29,tmL`.

    E is the embedding, t a decoder layer, m one of multi-token prediction, which counts nowhere, L the loss. ValueError
    says what megatron, or this project, does not take: the embedding behind the first place, the loss before the last,
    layers of multi-token prediction apart from it, a stage between the ends without a layer.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        if sum(len(part) * int(times) for part, times in pattern.findall(unrolled)) > _MOST_LETTERS:
            raise ValueError(f"pipeline layout {text!r} has more than {_MOST_LETTERS} letters")
        unrolled = pattern.sub(lambda match: match[1] * int(match[2]), unrolled)
    stages = unrolled.split("|")
    if odd := sorted(set(unrolled) - set("EtmL|")):
        raise ValueError(f"pipeline layout {text!r}: cannot read {odd[0]!r}; letters are E, t, m and L, | ends a stage")
    if unrolled.count("E") != 1 or unrolled.count("L") != 1 or not re.fullmatch(r"E[t|]*t*m*L", unrolled):
        raise ValueError(
            f"pipeline layout {text!r}: one E comes first and one L last, between them layers (t), and m only beside L"
        )
    return checked(tuple(stage.count("t") for stage in stages), f"pipeline layout {text!r}")


def uneven_stages(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """Stages of Megatron's arguments, of which `first` is `decoder_first_pipeline_num_layers`, and so on.

    `embedding` and `loss`: whether these count as a layer (`account_for_embedding_in_pipeline_split`). ValueError names
    the numbers that do not divide.
    """
    given = {} if pp == 1 else {stage: num for stage, num in ((0, first), (pp - 1, last)) if num is not None}
    rest, others = num_layers + embedding + loss - sum(given.values()), pp - len(given)
    if rest < 0 or (rest % others if others else rest):
        raise ValueError(f"{rest} of {num_layers} layers do not divide by the {others} of {pp} stages that share them")
    each = [given.get(stage, rest // max(others, 1)) for stage in range(pp)]
    stages = list(spread(tuple(each), vpp))
    stages[0] -= embedding
    stages[-1] -= loss
    return checked(tuple(stages), f"{num_layers} layers on pp={pp}, vpp={vpp}")


def spread(each: tuple[int, ...], vpp: int) -> tuple[int, ...]:
    """Layers of each rank's stage as those of `vpp` virtual ones, equally many. ValueError when they do not divide."""
    if odd := [num for num in each if num % vpp]:
        raise ValueError(f"{odd[0]} layers of a stage do not divide by vpp={vpp}")
    return tuple(num // vpp for _ in range(vpp) for num in each)


def checked(stages: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Embedding and loss stand at the ends, so only these may have no layer. ValueError names `what`."""
    if min(stages) < 0 or 0 in stages[1:-1]:
        raise ValueError(f"{what}: stages of {stages} layers; each needs one above 0, but for the first and the last")
    return stages
