"""Every form from every form: round trips that end in the same bytes, torch's own reader and writer as witnesses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megastream.convert.forms import Options
from megastream.convert.inert_pickle import Opaque, loads
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, difference, random_tensor, tensors_of, write_hf

TRIPS = [
    ("qwen3_moe", {}, "tp2 etp1 ep4 pp2 vpp2", "tp2 ep2 pp2"),
    pytest.param("qwen2_moe", {}, "tp2 etp2 ep2 pp2(3,1)", "tp4 pp3", marks=pytest.mark.full),
    pytest.param("qwen3_moe", {"tied": True}, "pp4", "pp2", marks=pytest.mark.full),
    ("qwen3_moe", {"experts": 6, "layers": 3, "vocab": 101}, "tp4 ep2 etp1 pp3", "tp4 ep4"),
]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.mark.parametrize(("family", "sizes", "trainer", "engine"), TRIPS)
def test_round_trips_end_in_the_same_bytes(
    tmp_path: Path, family: str, sizes: dict[str, Any], trainer: str, engine: str
) -> None:
    source = write_hf(tmp_path / "hf", family, **sizes)
    dist = converted(source, tmp_path / "dist", "torch_dist", max_file_bytes=60_000)
    ranks = converted(dist, tmp_path / "ranks", "mp_rank", to_layout=trainer)
    state = converted(ranks, tmp_path / "state", "sharded_state", to_layout=engine, max_file_bytes=60_000)
    others = converted(state, tmp_path / "others", "mp_rank", to_layout="pp2(1,2)" if sizes.get("layers") else "ep2")
    again = converted(others, tmp_path / "again", "torch_dist")
    back = converted(again, tmp_path / "back")
    assert weights(back) == weights(source)
    assert weights(converted(state, tmp_path / "from-state")) == weights(source)
    for one, other in ((dist, state), (state, ranks), (ranks, again), (others, source)):
        assert difference(one, other) is None
    assert difference(ranks, source, from_layout=trainer) is None


def test_torch_reads_the_distributed_checkpoint(tmp_path: Path) -> None:
    """Each key by torch's own reader: a fused parameter is what the Hugging Face tensors say, by hand."""
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    folder = converted(source, tmp_path / "dist", "torch_dist")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    loaded: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if "_extra_state" not in name
    }
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    hf, layer = tensors_of(source), "decoder.layers.1."
    q, k, v = (hf[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    groups = [torch.cat([q[g * 16 : g * 16 + 16], k[g * 8 : g * 8 + 8], v[g * 8 : g * 8 + 8]]) for g in range(4)]
    assert loaded[f"{layer}self_attention.linear_qkv.weight"].equal(torch.cat(groups))
    expert = "model.layers.1.mlp.experts.3."
    assert loaded[f"{layer}mlp.experts.experts.3.linear_fc1.weight_w"].equal(hf[f"{expert}gate_proj.weight"])
    assert loaded[f"{layer}mlp.experts.experts.3.linear_fc1.weight_v"].equal(hf[f"{expert}up_proj.weight"])
    assert loaded[f"{layer}pre_mlp_layernorm.weight"].equal(hf["model.layers.1.post_attention_layernorm.weight"])


def test_torch_reads_the_files_of_ranks(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    folder = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2 pp2")
    names = sorted(path.name for path in folder.glob("mp_rank_*"))
    assert names == ["mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_01_000_001", "mp_rank_01_001_001"]
    stored = torch.load(folder / names[3] / "model_optim_rng.pt", weights_only=False)
    assert stored["args"].tensor_model_parallel_size == 2 and stored["checkpoint_version"] == 3.0
    model, hf = stored["model"], tensors_of(source)
    down = hf["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert model["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"].equal(down)
    rows = model["output_layer.weight"]
    assert rows.shape == (128, 48) and not rows[102 - 128 :].any(), "padded rows are 0"


def stock_checkpoint(folder: Path, hf: dict[str, torch.Tensor], *, layers: int, experts: int) -> None:
    """As megatron writes it by default: layers and experts are leading dims, gate above up, the vocabulary padded."""
    stacked: dict[str, list[torch.Tensor]] = {}
    for layer in range(layers):
        source, target = f"model.layers.{layer}.", "decoder.layers."
        q, k, v = (hf[f"{source}self_attn.{name}_proj.weight"] for name in "qkv")
        fused = [torch.cat([q[g * 16 : g * 16 + 16], k[g * 8 : g * 8 + 8], v[g * 8 : g * 8 + 8]]) for g in range(4)]
        parts = {
            "self_attention.linear_qkv.weight": torch.cat(fused),
            "self_attention.linear_qkv.layer_norm_weight": hf[f"{source}input_layernorm.weight"],
            "self_attention.q_layernorm.weight": hf[f"{source}self_attn.q_norm.weight"],
            "self_attention.k_layernorm.weight": hf[f"{source}self_attn.k_norm.weight"],
            "self_attention.linear_proj.weight": hf[f"{source}self_attn.o_proj.weight"],
            "mlp.linear_fc1.layer_norm_weight": hf[f"{source}post_attention_layernorm.weight"],
            "mlp.router.weight": hf[f"{source}mlp.gate.weight"],
        }
        each = [f"{source}mlp.experts.{expert}." for expert in range(experts)]
        gated = [torch.cat([hf[f"{e}gate_proj.weight"], hf[f"{e}up_proj.weight"]]) for e in each]
        parts["mlp.experts.experts.linear_fc1.weight"] = torch.stack(gated)
        parts["mlp.experts.experts.linear_fc2.weight"] = torch.stack([hf[f"{e}down_proj.weight"] for e in each])
        for name, value in parts.items():
            stacked.setdefault(target + name, []).append(value)
    state: dict[str, Any] = {name: torch.stack(values) for name, values in stacked.items()}
    state["embedding.word_embeddings.weight"] = torch.cat([hf["model.embed_tokens.weight"], torch.zeros(26, 48)])
    state["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    state["output_layer.weight"] = torch.cat([hf["lm_head.weight"], torch.zeros(26, 48)])
    state["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3)
    state["rng_state"] = {"any": "thing"}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_leading_dims_of_layers_and_experts_are_read(tmp_path: Path) -> None:
    """torch saves a stack as one box; megatron saves one for each layer, and for each expert or for all of a rank,
    which real ranks test elsewhere."""
    source = write_hf(tmp_path / "hf", layers=2, experts=3, dtype=torch.float32)
    stock_checkpoint(tmp_path / "stock", tensors_of(source), layers=2, experts=3)
    done = convert(tmp_path / "stock", tmp_path / "back", Options(config=source), lambda done, total: None)
    assert weights(tmp_path / "back") == weights(source)
    assert sorted(done.left_out)[0] == "optimizer.state.exp_avg.output_layer.weight"
    assert done.grouped == 2
    (tmp_path / "root").mkdir()
    for tracker, text, step in (
        ("latest_checkpointed_iteration.txt", "7", "iter_0000007"),
        ("CURRENT", "step", "step"),
    ):
        (tmp_path / "root" / tracker).write_text(text)
        (tmp_path / "stock").rename(tmp_path / "root" / step)
        assert difference(tmp_path / "root", source) is None
        (tmp_path / "root" / step).rename(tmp_path / "stock")
        (tmp_path / "root" / tracker).unlink()


def edit_rank(folder: Path, rank: str, name: str, change: Any) -> None:
    path = folder / rank / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    change(stored, stored["model"].get(name))
    torch.save(stored, path)


def test_replicas_that_differ_are_reported(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2")
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    edit_rank(ranks, "mp_rank_01_001", name, lambda stored, tensor: tensor[5].fill_(77.0))
    words = rf"self_attn.q_norm.weight\[5\] is .* in one and 77 in the other: {name} of rank 0 in .*, and .*rank 1 in"
    for to, layout in (("hf", None), ("torch_dist", None), ("sharded_state", "tp2")):
        with pytest.raises(ConvertError, match=words):
            converted(ranks, tmp_path / "out", to, to_layout=layout)
    assert not (tmp_path / "out").exists()


def test_padded_rows_are_left_behind(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4, vocab=101)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2")
    for rank, first in (("mp_rank_00_000", 101), ("mp_rank_01_001", 0)):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            edit_rank(ranks, rank, name, lambda stored, tensor, first=first: tensor[first:].fill_(float("nan")))
    assert weights(converted(ranks, tmp_path / "back")) == weights(source)
    assert difference(ranks, converted(source, tmp_path / "state", "sharded_state", to_layout="tp4")) is None


def transformer_engine(stored: dict[str, Any], tensor: object) -> None:
    """The names that Transformer Engine's spec gives: experts behind `weight`, norms inside the linear behind them."""
    model = {}
    for name, value in stored["model"].items():
        if match := re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc\d)\.weight", name):
            name = f"{match[1]}.{match[3]}.weight{match[2]}"
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        model[name] = value
        model[f"{name.rpartition('.')[0]}._extra_state"] = None
    stored["model"] = model


def test_names_of_transformer_engine_are_read(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2")
    for rank in ("mp_rank_00_000", "mp_rank_01_001"):
        edit_rank(ranks, rank, ROUTER, transformer_engine)
    stored = torch.load(ranks / rank / "model_optim_rng.pt", weights_only=False)["model"]
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight1" in stored
    assert weights(converted(ranks, tmp_path / "back")) == weights(source)


RANK_FAULTS: dict[str, tuple[Any, str]] = {
    "a parameter is missing": (lambda stored, tensor: stored["model"].popitem(), "lacks"),
    "one that is unknown": (
        lambda stored, tensor: stored["model"].update({"decoder.layers.0.x.weight": torch.zeros(2)}),
        "decoder.layers.0.x.weight has no rule",
    ),
    "a layer beyond the stage": (
        lambda stored, tensor: stored["model"].update({"decoder.layers.2.mlp.router.weight": tensor}),
        "decoder.layers.2.mlp.router.weight is beyond the 2 layers of this stage",
    ),
    "experts that collide": (
        lambda stored, tensor: stored["model"].update(
            {"decoder.layers.0.mlp.experts.linear_fc2.weight0": torch.zeros(48, 20).bfloat16()}
        ),
        r"experts.0.down_proj.weight\[0, 0\] is .* in one and 0 in the other: .*linear_fc2.weight0? of rank 0",
    ),
    "another shape": (lambda stored, tensor: stored["model"].update({ROUTER: tensor[:2]}), "has shape"),
    "no model": (lambda stored, tensor: stored.pop("model"), "holds no `model`"),
    "virtual stages": (
        lambda stored, tensor: stored.update(model0=stored.pop("model")),
        "has no `model`, which layout",
    ),
}
ROUTER = "decoder.layers.0.mlp.router.weight"


@pytest.mark.parametrize("fault", RANK_FAULTS)
def test_files_of_ranks_that_are_unfit_are_refused(tmp_path: Path, fault: str) -> None:
    ranks = converted(
        write_hf(tmp_path / "hf", layers=2, experts=4), tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2"
    )
    change, words = RANK_FAULTS[fault]
    edit_rank(ranks, "mp_rank_00_000", ROUTER, change)
    with pytest.raises(ConvertError, match=words) as caught:
        converted(ranks, tmp_path / "out")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_layouts_are_asked_for_and_held_against_the_files(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    with pytest.raises(ConvertError, match="say which with --to-layout"):
        converted(source, tmp_path / "x", "mp_rank")
    with pytest.raises(ConvertError, match="hf has no layout; leave --to-layout out"):
        converted(source, tmp_path / "x", "hf", to_layout="tp2")
    with pytest.raises(ConvertError, match="ranks with different parts of an expert would share mp_rank_00"):
        converted(source, tmp_path / "x", "mp_rank", to_layout="tp1 etp2")
    with pytest.raises(ConvertError, match="do not divide by ep=3"):
        converted(source, tmp_path / "x", "mp_rank", to_layout="ep3")
    with pytest.raises(ConvertError, match="do.* not divide by tp=3"):
        converted(source, tmp_path / "x", "sharded_state", to_layout="tp3")
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="ep2")
    with pytest.raises(ConvertError, match="holds 2 ranks .* layout tp1 ep2 dp2 pp2 has 4 .*give the right one"):
        converted(ranks, tmp_path / "x", from_layout="ep2 pp2")
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp2 ep2 pp2")
    with pytest.raises(ConvertError, match="was written under tp2 etp1 ep2 pp2, not under tp2 pp2"):
        converted(state, tmp_path / "x", from_layout="tp2 pp2")
    (state / "model-pp-1-tp-0-part-0.safetensors").unlink()
    with pytest.raises(ConvertError, match="no file of pipeline rank 1, tensor rank 0"):
        converted(state, tmp_path / "x")


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.truncate(at)


@pytest.mark.parametrize("fault", ["data", "index", "missing"])
def test_a_damaged_distributed_checkpoint_is_refused(tmp_path: Path, fault: str) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    dist = converted(source, tmp_path / "dist", "torch_dist")
    if fault == "data":
        damage(dist / "__0_0.distcp", 4096)
    elif fault == "index":
        damage(dist / ".metadata", 200)
    else:
        (dist / "__0_0.distcp").unlink()
    with pytest.raises(ConvertError, match="damaged|cannot be read|cut off") as caught:
        converted(dist, tmp_path / "x")
    assert str(dist) in str(caught.value) and "\n" not in str(caught.value)


def test_pickles_run_nothing(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    import pickle

    assert isinstance(loads(pickle.dumps({"a": Trap()}))["a"], Opaque)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "ran").exists(), "the trap works"


def test_random_tensors_differ() -> None:
    assert not random_tensor("a", (4,), torch.float32).equal(random_tensor("b", (4,), torch.float32))
