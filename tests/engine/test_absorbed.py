"""MLA's absorbed matrices, as vLLM's own code makes them of `kv_b_proj` at a cold start: written, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream.engine.contract import LiveModelError  # noqa: E402
from megastream.engine.vllm import buffers, compat_mla, cpu_repairs, refusals  # noqa: E402

HAS_AMX = torch.cpu._is_amx_tile_supported()
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="vLLM packs absorbed matrices on CPUs with AMX alone")
SIZES = [(4, 32, 32, 512), (2, 128, 128, 512), (3, 64, 32, 96)]
"""Heads, width of keys without position, of values, of the latent."""
NAME = "kv_b_proj.weight"


def random(sizes: tuple[int, int, int, int], seed: int) -> torch.Tensor:
    heads, nope, v, latent = sizes
    return torch.randn(heads * (nope + v), latent, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cold(weight: torch.Tensor, sizes: tuple[int, int, int, int], *, packs: bool) -> Any:
    """`kv_b_proj` and its attention as vLLM leaves them behind a load, with what its own processing reads of them."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    heads, nope, v, latent = sizes
    linear, attention = torch.nn.Module(), MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    linear.weight, linear.quant_method = torch.nn.Parameter(weight.clone(), requires_grad=False), None
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        attention.register_buffer(name, torch.ones(()))
    model: Any = torch.nn.ModuleDict({"kv_b_proj": linear, "attn": attention})
    record_metadata_for_reloading(model)
    kind = AMXMLAImpl if packs else CPUMLAImpl
    shared = dict(num_heads=heads, qk_nope_head_dim=nope, v_head_dim=v, kv_lora_rank=latent)
    impl = kind.__new__(kind)
    vars(impl).update(shared, kv_b_proj=linear)
    vars(attention).update(shared, impl=impl, is_amx_bmm_enabled=packs, quant_config=None, dcp_q_replicate=False)
    vars(attention).update(dict.fromkeys(("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled"), False))
    attention.kv_b_proj = linear
    attention.process_weights_after_loading(torch.bfloat16)
    return model


def places(tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@needs_amx
@pytest.mark.parametrize("sizes", SIZES)
def test_packed_matrices_are_those_of_a_cold_start(sizes: tuple[int, int, int, int]) -> None:
    first, second = random(sizes, 1), random(sizes, 2)
    live = cold(first, sizes, packs=True)
    assert live.kv_b_proj.weight.numel() == 0
    refusals.refuse_derived(live, 0)
    found = buffers.collect(live, True)
    (buffer,) = found.values()
    refusals.refuse_buffer(buffer, 0)
    assert list(found) == [NAME] and (buffer.dtype, buffer.shape) == ("bfloat16", tuple(first.shape))
    assert torch.equal(buffer.read(), first) and buffer.in_place() is None
    before = places(compat_mla.packed(live.attn))
    staged = second.clone()
    prepared = buffer.prepare(staged)
    staged.fill_(float("nan"))  # staging is written again: nothing live may alias it
    assert torch.equal(buffer.read(), first)
    buffers.apply(prepared)
    buffers.apply(prepared)
    expected = compat_mla.packed(cold(second, sizes, packs=True).attn)
    for made, fresh, old in zip(compat_mla.packed(live.attn), expected, (0, 1), strict=True):
        assert torch.equal(made.view(torch.int16), fresh.view(torch.int16)), f"matrix {old}"
    assert places(compat_mla.packed(live.attn)) == before and torch.equal(buffer.read(), second)


@needs_amx
@pytest.mark.parametrize("matrix", [0, 1])
def test_a_flipped_bit_in_either_packed_matrix_is_seen(matrix: int) -> None:
    live = cold(random(SIZES[0], 1), SIZES[0], packs=True)
    (buffer,) = buffers.collect(live, True).values()
    before = buffer.read().clone()
    compat_mla.packed(live.attn)[matrix].view(-1)[77:78].view(torch.int16).bitwise_xor_(1)
    assert (buffer.read() != before).sum() == 1


@needs_amx
def test_a_packed_weight_is_written_as_a_whole() -> None:
    (buffer,) = buffers.collect(cold(random(SIZES[0], 1), SIZES[0], packs=True), True).values()
    with pytest.raises(LiveModelError, match="kv_b_proj.weight is packed as a whole"):
        buffer.prepare(random(SIZES[0], 2), slice(0, 8))


@needs_amx
def test_a_reload_gets_room_for_the_weight() -> None:
    """vLLM's layerwise reload copies into what stands there, and the attention packs it: here by hand."""
    second = random(SIZES[0], 2)
    live = cold(random(SIZES[0], 1), SIZES[0], packs=True)
    (buffer,) = buffers.collect(live, True).values()
    cpu_repairs.room_for_latent(live)
    live.kv_b_proj.weight.data.copy_(second)
    live.attn.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(buffer.read(), second), "also where the kernel's matrices are other tensors now"


@pytest.mark.parametrize("sizes", SIZES)
def test_views_are_written_with_the_weight(sizes: tuple[int, int, int, int]) -> None:
    """The form of every kernel but AMX's, on a GPU too."""
    first, second = random(sizes, 1), random(sizes, 2)
    live = cold(first, sizes, packs=False)
    refusals.refuse_derived(live, 0)
    (buffer,) = buffers.collect(live, True).values()
    assert buffer.name == NAME and isinstance(buffer, buffers.Plain)
    before = places(live.parameters())
    buffers.apply(buffer.prepare(second))
    fresh = cold(second, sizes, packs=False)
    for name in ("W_UV", "W_UK_T"):
        assert torch.equal(getattr(live.attn, name), getattr(fresh.attn, name)), name
    assert len(before) == 3 and places(live.parameters()) == before


def copied(attention: Any) -> None:
    attention.W_UK_T = torch.nn.Parameter(attention.W_UK_T.data.contiguous(), requires_grad=False)


def elsewhere(attention: Any) -> None:
    """A view of the right shape, of other elements."""
    attention.W_UV = torch.nn.Parameter(attention.W_UK_T.data.transpose(1, 2), requires_grad=False)


def gathered(attention: Any) -> None:
    both = torch.cat([attention.W_UK_T.data] * 2)
    attention.W_UK_T_dcp_qrep = torch.nn.Parameter(both, requires_grad=False)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (copied, r"attn.W_UK_T \(\(4, 32, 512\), bfloat16\) on engine rank 3 .* computed from kv_b_proj in memory"),
        (elsewhere, r"attn.W_UV \(\(4, 512, 32\), bfloat16\)"),
        (gathered, r"attn.W_UK_T_dcp_qrep \(\(8, 32, 512\), bfloat16\)"),
        (lambda attention: setattr(attention.impl, "w_uk", torch.ones(3)), r"attn.impl.w_uk \(\(3,\), float32\)"),
    ],
)
def test_what_a_write_would_not_reach_is_refused_by_name(plant: Any, named: str) -> None:
    live = cold(random(SIZES[0], 1), SIZES[0], packs=False)
    plant(live.attn)
    with pytest.raises(LiveModelError, match=named) as caught:
        refusals.refuse_derived(live, 3)
    assert "\n" not in str(caught.value) and "when a version is committed" in str(caught.value)


@needs_amx
def test_another_tensor_beside_the_packed_ones_is_refused() -> None:
    live = cold(random(SIZES[0], 1), SIZES[0], packs=True)
    live.attn.impl._w_uk_fp8 = compat_mla.packed(live.attn)[0].float()
    with pytest.raises(LiveModelError, match="attn.impl._w_uk_fp8 .* may be computed from weights"):
        refusals.refuse_derived(live, 0)
