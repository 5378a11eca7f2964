"""Real Megatron ranks load what was converted, with megatron's own reader, and what they save is converted back.

Expected parameters come from the adapter's `load_hf`, which reads the Hugging Face folder itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.families import family_of, load_shape
from megastream.trainer import compat, compat_checkpoint, model
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.checkpoint_state import describe
from megastream.trainer.config import TrainerConfig
from tests.helpers.convert_models import MODELS, converted, difference, tensors_of, write_hf
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import BIAS

LAYOUTS = [
    pytest.param("qwen3_moe", dict(tp=2, ep=2, etp=1), "tp2 ep2 etp1", 2, id="tp2 ep2 etp1", marks=pytest.mark.full),
    pytest.param("qwen2_moe", dict(pp=2, ep=2), "pp2 ep2", 4, id="qwen2 pp2 ep2", marks=pytest.mark.full),
    pytest.param("qwen3_moe", dict(pp=2, vpp=2), "pp2 vpp2", 2, id="pp2 vpp2", marks=pytest.mark.full),
    pytest.param("qwen3_moe", dict(pp=2, tied=True), "pp2", 2, id="pp2 tied", marks=pytest.mark.full),
    pytest.param("qwen3_moe", dict(tp=2, ep=2), "tp2 ep2 etp2", 4, id="tp2 ep2 etp2", marks=pytest.mark.full),
    pytest.param("glm4_moe", dict(pp=2, vpp=2, mtp_layers=2), "pp2 vpp2", 2, id="pp2 vpp2 mtp", marks=pytest.mark.full),
    pytest.param(
        "glm4_moe",
        dict(tp=2, ep=2, etp=1, layers=2, mtp_layers=1),
        "tp2 ep2 etp1",
        2,
        id="tp2 ep2 etp1 mtp",
        marks=pytest.mark.full,
    ),
]


def _file(folder: Path) -> Path:
    """Where megatron keeps this rank's weights."""
    at = mesh_coords()
    name = f"mp_rank_{at['tp']:02}" + (f"_{at['pp']:03}" if at["pp_size"] > 1 else "")
    return folder / (name + (f"_{at['ep']:03}" if at["ep_size"] > 1 else "")) / "model_optim_rng.pt"


def _params(chunks: Any) -> list[tuple[str, torch.Tensor]]:
    return [(f"{n} {name}", p) for n, chunk in enumerate(chunks) for name, p in chunk.named_parameters()]


def _save(chunks: Any, optimizer: Any, folder: Path) -> None:
    """As megatron does: both kinds of keys of `torch_dist`, and the files of ranks; and with the optimizer's state."""
    original = dict(compat_checkpoint.METADATA)
    for kind, metadata in (("singleton", original), ("stacked", {})):
        compat_checkpoint.METADATA.clear()
        compat_checkpoint.METADATA.update(metadata)
        (folder / kind).mkdir(parents=True, exist_ok=True)
        state = {f"model{n}": part for n, part in enumerate(compat_checkpoint.sharded_models(chunks))}
        planned = compat_checkpoint.plan_save(state, folder / kind)
        planned.write()
        planned.publish_index()
    compat_checkpoint.METADATA.update(original)
    compat_checkpoint.allocate_moments(optimizer)
    (folder / "masters").mkdir(exist_ok=True)
    planned = compat_checkpoint.plan_save(describe(chunks, optimizer), folder / "masters")
    planned.write()
    planned.publish_index()
    path = _file(folder / "ranks")
    path.parent.mkdir(parents=True, exist_ok=True)
    models = [compat_checkpoint._model_in(chunk).state_dict() for chunk in chunks]
    named = {"model": models[0]} if len(models) == 1 else {f"model{n}": part for n, part in enumerate(models)}
    partial = path.with_suffix(f".{dist.get_rank()}")  # ranks that hold the same write the same file
    torch.save({**named, "checkpoint_version": 3.0, "iteration": 1}, partial)
    partial.replace(path)


def _differing(chunks: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, param in _params(chunks) if not param.equal(expected[name])]


def _body(
    rank: int,
    world_size: int,
    init_method: str,
    config: TrainerConfig,
    hf: Path,
    target: Path,
    ranks: Path,
    stock: Path,
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=100)
    chunks, optimizer = model.build(config)
    shape = load_shape(hf)
    MegatronAdapter(chunks, optimizer, family_of(shape), shape).load_hf(hf)
    expected = {name: param.detach().clone() for name, param in _params(chunks)}
    with torch.no_grad():
        for shard in compat.main_shards(optimizer):  # masters that are not their weights
            shard.main.add_(1.0)
    _save(chunks, optimizer, stock)
    found: dict[str, Any] = {"num": len(expected)}

    for _, param in _params(chunks):
        param.data.fill_(9.0)
    metadata = dist_checkpointing.load_content_metadata(str(target))
    assert metadata == {"singleton_local_shards": True}
    state = {f"model{n}": part for n, part in enumerate(compat_checkpoint.sharded_models(chunks))}
    loaded = dist_checkpointing.load(state, str(target))
    for number, chunk in enumerate(chunks):
        compat_checkpoint.set_model(chunk, loaded[f"model{number}"])
    found["dist"] = _differing(chunks, expected)

    for _, param in _params(chunks):
        param.data.fill_(9.0)
    stored = torch.load(_file(ranks), weights_only=False)
    for number, chunk in enumerate(chunks):
        part = stored["model"] if len(chunks) == 1 else stored[f"model{number}"]
        keys = compat_checkpoint._model_in(chunk).load_state_dict(part, strict=False)
        found["keys"] = [key for key in keys.missing_keys if "_extra_state" not in key] + keys.unexpected_keys
    found["ranks"] = _differing(chunks, expected)
    return found


@pytest.mark.parametrize(("family", "settings", "layout", "world_size"), LAYOUTS)
def test_megatron_loads_it_and_what_megatron_saves_is_read(
    tmp_path: Path, family: str, settings: dict[str, Any], layout: str, world_size: int
) -> None:
    sizes = {"vocab": 256} | {name: settings[name] for name in ("tied", "layers", "mtp_layers") if name in settings}
    hf = write_hf(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes)
    target = converted(hf, tmp_path / "dist", "torch_dist", max_file_bytes=100_000)
    ranks = converted(target, tmp_path / "ranks", "mp_rank", to_layout=layout)
    config = MODELS[family](dtype="bfloat16", **{**sizes, **settings})
    stock = tmp_path / "stock"
    folders = dict(hf=hf, target=target, ranks=ranks, stock=stock)
    for found in run_ranks(_body, world_size, config=config, timeout_s=200, **folders):
        assert found["num"] > 10 and (found["dist"], found["keys"], found["ranks"]) == ([], [], [])
    for kind in ("singleton", "stacked"):
        back = converted(stock / kind, tmp_path / f"from-{kind}", config=hf)
        assert (back / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    back = converted(stock / "ranks", tmp_path / "from-ranks", config=hf, from_layout=layout)
    assert (back / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    assert difference(target, stock / "stacked") is None
    masters = tensors_of(converted(stock / "masters", tmp_path / "from-masters", config=hf, from_masters=True))
    for name, tensor in tensors_of(hf).items():
        stepped = not name.endswith(BIAS)  # no optimizer has a master of a router's bias
        assert masters[name].equal(tensor.float() + stepped), name
