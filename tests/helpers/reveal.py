"""Weights that spell their version: every token says which version it met at four places of the model.

A token's id is 16 + a number of four digits in base 6: the version (mod 6) of the embedding, of a routed expert in the
first layer (EP rank 0), of a routed expert in the last layer (EP rank 1), and of the head. The first and the last stand
on different pipeline stages too. Every token's embedding is alike, so the router's choice never changes, and attention
adds nothing. A half-written expert (gate of one version, down of another) spells a digit three off.
"""

from __future__ import annotations

import torch

from tests.helpers.tiny_moe import TinyMoe, Weights, fill

BASE = 6
PLACES = 4
FIRST_TOKEN = 16
CONSTANT = 3 * BASE
"""Residual dim that is 1 for every token; dims below hold the digits seen so far."""
MOE = TinyMoe(vocab=FIRST_TOKEN + BASE**PLACES)


def digits(token: int) -> tuple[int, ...]:
    """The four digits of a token: embedding, first expert, last expert, head."""
    number = token - FIRST_TOKEN
    if not 0 <= number < BASE**PLACES:
        return (-1,) * PLACES
    return tuple(number // BASE ** (PLACES - 1 - place) % BASE for place in range(PLACES))


def is_mixed(token: int) -> bool:
    """True when the token met more than one version."""
    return len(set(digits(token))) != 1


def is_mislabelled(token: int, label: str) -> bool:
    """True when a token of one version carries another's label."""
    return not is_mixed(token) and digits(token)[0] != int(label) % BASE


def weights(version: int) -> Weights:
    """The checkpoint of a version."""
    digit = version % BASE
    sites = {(0, 0): 1, (MOE.layers - 1, MOE.experts - 1): 2}

    def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.zeros(shape)
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif "embed_tokens" in name:
            tensor[:, digit] = tensor[:, CONSTANT] = 1
        elif "mlp.gate.weight" in name:
            tensor[[0, MOE.experts - 1], CONSTANT] = 0.5
        elif "lm_head" in name:
            _fill_head(tensor, digit)
        elif "mlp.experts" in name:
            parts = name.split(".")
            site = sites.get((int(parts[2]), int(parts[5])))
            if site is not None:
                _fill_expert(tensor, parts[6], digit, site)
        return tensor

    return fill(MOE, values)


def _fill_head(tensor: torch.Tensor, digit: int) -> None:
    number = torch.arange(BASE**PLACES)
    number = number[number % BASE == digit]
    for place in range(PLACES - 1):
        tensor[FIRST_TOKEN + number, place * BASE + number // BASE ** (PLACES - 1 - place) % BASE] = 1


def _fill_expert(tensor: torch.Tensor, projection: str, digit: int, site: int) -> None:
    """Unit `digit` answers to the constant; its output goes to the digit's dim, any other unit's three further."""
    if projection != "down_proj":
        tensor[digit, CONSTANT] = 0.25
        return
    strength = 1.25 if site == 1 else 2.0  # makes the residual grow by about 1 in either layer
    for unit in range(BASE):
        tensor[site * BASE + (digit if unit == digit else (digit + 3) % BASE), unit] = strength
