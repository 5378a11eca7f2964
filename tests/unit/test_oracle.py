"""The oracle itself: from a HF model cut up as Megatron cuts it, it finds the model and vLLM's tensors again."""

from __future__ import annotations

import pytest
import torch

from megastream.rl import oracle
from megastream.rl.checkpoint import random_tensors, tensor_shapes, write_checkpoint
from megastream.rl.config import ModelConfig

MODEL = ModelConfig(layers=4, hidden=16, heads=4, kv_heads=2, head_dim=4, experts=6, top_k=2, expert_ffn=8)
HF = random_tensors(MODEL, seed=1)


def megatron_params(tp: int) -> list[oracle.Dump]:
    """HF -> Megatron, written for this test element by element from the layout facts."""
    dumps = []
    for rank in range(2 * tp):
        t, replica = rank % tp, rank // tp
        params: dict[str, torch.Tensor] = {
            "embedding.word_embeddings.weight": HF["model.embed_tokens.weight"].chunk(tp)[t],
            "output_layer.weight": HF["lm_head.weight"].chunk(tp)[t],
            "decoder.final_layernorm.weight": HF["model.norm.weight"],
        }
        for layer in range(MODEL.layers):
            p, m = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            q, k, v = (HF[p + f"self_attn.{n}_proj.weight"].split(MODEL.head_dim) for n in "qkv")
            rows = [x for g in range(2) for x in (q[2 * g], q[2 * g + 1], k[g], v[g])]
            params[m + "self_attention.linear_qkv.weight"] = torch.cat(rows).chunk(tp)[t]
            params[m + "self_attention.linear_proj.weight"] = HF[p + "self_attn.o_proj.weight"].chunk(tp, 1)[t]
            params[m + "self_attention.q_layernorm.weight"] = HF[p + "self_attn.q_norm.weight"]
            params[m + "self_attention.k_layernorm.weight"] = HF[p + "self_attn.k_norm.weight"]
            params[m + "input_layernorm.weight"] = HF[p + "input_layernorm.weight"]
            params[m + "pre_mlp_layernorm.weight"] = HF[p + "post_attention_layernorm.weight"]
            params[m + "mlp.router.weight"] = HF[p + "mlp.gate.weight"]
            for e in range(MODEL.experts):
                if e % 2 != replica:
                    continue
                x, y = p + f"mlp.experts.{e}.", m + f"mlp.experts.local_experts.{e}."
                gate, up = (HF[x + f"{n}_proj.weight"].chunk(tp)[t] for n in ("gate", "up"))
                params[y + "linear_fc1.weight"] = torch.cat([gate, up])
                params[y + "linear_fc2.weight"] = HF[x + "down_proj.weight"].chunk(tp, 1)[t]
        dumps.append(oracle.Dump(rank, t, t, params))
    return dumps


@pytest.mark.parametrize("tp", [1, 2])
def test_gather_finds_the_model_again(tp: int) -> None:
    found = oracle.to_hf(oracle.gather(megatron_params(tp)), MODEL)
    assert found.keys() == HF.keys()
    assert all(torch.equal(found[name], HF[name]) for name in HF)


def test_replicas_that_differ_are_named() -> None:
    dumps = megatron_params(1)
    dumps[1].params["decoder.final_layernorm.weight"] = HF["model.norm.weight"] + 1
    with pytest.raises(oracle.OracleError, match="ranks 0 and 1 .*final_layernorm"):
        oracle.gather(dumps)


@pytest.mark.parametrize("layout", ["single", "pp2", "tp2ep"])
def test_engine_ranks_hold_every_element_once(layout: str) -> None:
    engine = oracle.EngineShape.of(layout)
    ranks = [oracle.expected_live(HF, MODEL, engine, rank) for rank in range(engine.ranks)]
    assert ranks[0]["model.embed_tokens.weight"].shape[0] * engine.tp == 320
    w13 = [t for rank in ranks for n, t in rank.items() if n.endswith("w13_weight")]
    assert sum(t.numel() for t in w13) == MODEL.layers * MODEL.experts * 2 * MODEL.expert_ffn * MODEL.hidden
    last = ranks[-1]["model.layers.3.mlp.experts.routed_experts.w2_weight"]
    assert torch.equal(last[-1], HF["model.layers.3.mlp.experts.5.down_proj.weight"])


def test_one_flipped_bit_is_one_difference() -> None:
    live = oracle.expected_live(HF, MODEL, oracle.EngineShape.of("pp2"), 0)
    expected = {name: oracle.digest(value) for name, value in live.items()}
    assert oracle.compare(expected, expected) == []
    name = "model.layers.1.mlp.experts.routed_experts.w2_weight"
    flipped = live[name].clone()
    flipped.view(torch.int16)[3, 2, 1] ^= 1
    assert oracle.compare(expected, {**expected, name: oracle.digest(flipped)}) == [name]
    assert oracle.compare(expected, {n: d for n, d in expected.items() if n != name}) == [name]


def test_checkpoint_is_seeded_and_complete(tmp_path) -> None:
    from safetensors.torch import load_file

    write_checkpoint(tmp_path, MODEL, HF)
    read = load_file(tmp_path / "model.safetensors")
    again = random_tensors(MODEL, seed=1)
    assert {n: tuple(t.shape) for n, t in read.items()} == dict(tensor_shapes(MODEL))
    assert all(torch.equal(read[n], again[n]) and read[n].dtype == torch.bfloat16 for n in read)


def test_digest_reads_values_as_the_engine_reports_them() -> None:
    from megastream.engine.digest import tensor_digest

    value = HF["lm_head.weight"].clone()
    value[0, :3] = torch.tensor([-0.0, 1e-39, -1e-39])
    assert oracle.digest(value) == tensor_digest(value)
    cleared = value.clone()
    cleared[0, :3] = 0
    assert oracle.digest(value) == oracle.digest(cleared)
