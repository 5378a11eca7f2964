"""What leaves of routers' biases is a copy: it follows the model until a stepper holds it, then steps that count."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megastream.trainer.router_bias import BUFFER, RouterBiases
from megastream.trainer.stepper import Trained

NAMES = [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (3, 10)]


def _biases() -> tuple[RouterBiases, list[SimpleNamespace]]:
    routers = [SimpleNamespace(expert_bias=torch.full((4,), float(number))) for number in (1, 2)]
    return RouterBiases(list(zip(NAMES, routers, strict=True))), routers


def test_the_copy_follows_the_model_until_it_is_held() -> None:
    biases, routers = _biases()
    assert biases.places == [(NAMES[0], (4,), 0), (NAMES[1], (4,), 4)]
    routers[1].expert_bias = torch.full((4,), 5.0)  # as megatron does when it makes it fp32 again
    assert biases.current().tolist() == [1.0] * 4 + [5.0] * 4
    biases.hold()
    routers[0].expert_bias.add_(1)
    assert biases.current().tolist() == [1.0] * 4 + [5.0] * 4
    assert biases.live[NAMES[0]].tolist() == [2.0] * 4


def test_a_step_that_counts_takes_them_and_says_so_once() -> None:
    biases, routers = _biases()
    biases.hold()
    routers[0].expert_bias.add_(1)
    final: list[str] = []
    Trained([], None, [], biases=biases).counts(final.append)
    assert final == [BUFFER]
    assert biases.current().tolist() == [2.0] * 8
    Trained([], None, []).counts(final.append)
    assert final == [BUFFER], "a model without them has nothing to say"


def test_what_was_loaded_into_the_copy_is_put_into_the_routers() -> None:
    biases, routers = _biases()
    biases.current().copy_(torch.arange(8.0))
    biases.put()
    assert [router.expert_bias.tolist() for router in routers] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
