"""vLLM's own fresh load of a folder, for every rank of a layout, before its post-load processing: against our layout.

No engine is started, and loading needs no message between ranks: one process takes one rank's place in vLLM's parallel
state after the other, and runs vLLM's own model loader there.

python -m tests.helpers.vllm_load JOBS.json RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

IDLE_BUFFERS = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "cos_sin_cache", "expert_map")
"""Ends of the names of vLLM's buffers that no checkpoint feeds."""


def main(jobs: Path, results: Path) -> None:
    """A job has name, model (a folder), tp, pp, ep (expert parallel or not); results: of each job, one per rank.

    With `packed` the model is saved once more by vLLM after its post-load processing, and what conversion says of it is
    in the result.
    """
    from vllm.distributed import parallel_state

    found, ready = [], False
    for job in json.loads(jobs.read_text()):
        config = _engine_config(job)
        if not ready:
            _alone(config, parallel_state, results.with_suffix(".rendezvous"))
            ready = True
        _write_state(job)
        found.append([_load(config, job, rank, parallel_state) for rank in range(job["tp"] * job["pp"])])
        results.write_text(json.dumps(found))


def _engine_config(job: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=job["model"],
        skip_tokenizer_init=True,
        tensor_parallel_size=job["tp"],
        pipeline_parallel_size=job["pp"],
        enable_expert_parallel=job["ep"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()


def _alone(config: Any, parallel_state: Any, rendezvous: Path) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def _stand_at(group: Any, rank: int, size: int) -> None:
    group.rank_in_group, group.rank, group.world_size, group.ranks = rank, rank, size, list(range(size))


def _load(config: Any, job: dict[str, Any], rank: int, parallel_state: Any) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models import utils as models
    from vllm.utils.torch_utils import set_default_torch_dtype

    stage, tp = divmod(rank, job["tp"])
    _stand_at(parallel_state.get_tp_group(), tp, job["tp"])
    _stand_at(parallel_state.get_pp_group(), stage, job["pp"])
    if job["ep"]:
        _stand_at(parallel_state.get_ep_group(), tp, job["tp"])
    config.compilation_config.static_forward_context.clear()  # names of the last rank's layers
    models._model_to_pp_missing_layer_names.clear()  # kept by id(), which another rank's freed model may have had
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        loader.load_weights(model, config.model_config)
        found = _compare(model, job, rank)
        return found | ({"packed": _packed(model, config.model_config, job)} if job.get("packed") else {})


def _compare(model: torch.nn.Module, job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Every byte of every parameter; and the layout that planning makes of the layout string alone."""
    from safetensors.torch import load_file

    from megastream.engine.vllm import compat
    from megastream.families import family_of, load_shape
    from megastream.layout.engine import EngineParam, engine_rank_layout
    from megastream.layout.mesh import parse_engine_mesh
    from megastream.layout.synthetic import engine_layouts

    shape = load_shape(Path(job["model"]))
    family = family_of(shape)
    mesh = parse_engine_mesh(_layout(job))
    planned = engine_layouts(family, shape, mesh)[rank]
    slots = {id(p): compat.expert_slots(m) for m in model.modules() if compat.is_experts(m) for p in m.parameters()}
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    layout = engine_rank_layout(
        family,
        shape,
        rank=rank,
        world_size=planned.world_size,
        coords=planned.coords,
        params=[
            EngineParam(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), slots.get(id(p)))
            for name, p in model.named_parameters()
        ],
        unused=planned.unused,
    )
    files = load_file(Path(job["model"]) / "model.safetensors")
    specs = {spec.name: spec.shape for spec in layout.tensors}
    counts = {spec.name: torch.zeros(spec.num_elements, dtype=torch.int32) for spec in layout.buffers}
    differing = []
    for shard in layout.shards:
        where = shard.box.shape, shard.strides, shard.offset
        live = held[shard.buffer].view(-1).as_strided(*where)
        stored = files[shard.tensor].view(specs[shard.tensor])[tuple(map(slice, shard.box.lo, shard.box.hi))]
        differing += [] if torch.equal(live, stored.to(live.dtype)) else [f"{shard.buffer} ({shard.tensor})"]
        counts[shard.buffer].as_strided(*where).add_(1)
    for name, count in counts.items():
        padding = held[name].view(-1)[count == 0]
        differing += [] if count.max() <= 1 and not padding.any() else [f"{name}: padding that is not 0, or twice"]
    return {
        "state": _state(model, job, rank),
        "compared": len(layout.shards),
        "differing": differing,
        "strange_buffers": [name for name, _ in model.named_buffers() if not name.endswith(IDLE_BUFFERS)],
        "unlike_planned": sorted(set(map(str, planned.shards)) ^ set(map(str, layout.shards)))[:5]
        + sorted(set(map(str, planned.buffers)) ^ set(map(str, layout.buffers)))[:5],
    }


def _layout(job: dict[str, Any]) -> str:
    return f"tp{job['tp']} pp{job['pp']} ep{job['tp'] if job['ep'] else 1}"


def _state_folder(job: dict[str, Any]) -> Path:
    return Path(f"{job['model']}-{job['name']}-state")


def _write_state(job: dict[str, Any]) -> None:
    from megastream.convert.forms import Options
    from megastream.convert.run import convert

    options = Options(to="sharded_state", to_layout=_layout(job), max_file_bytes=1 << 40)
    convert(Path(job["model"]), _state_folder(job), options, lambda done, total: None)


def _state(model: torch.nn.Module, job: dict[str, Any], rank: int) -> list[str]:
    """What differs, by name, type, shape or any byte, between the state that vLLM itself would save of this rank, its
    padded rows and scales too, and what conversion wrote for it."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    stage, tp = divmod(rank, job["tp"])
    name = f"model-pp-{stage}-tp-{tp}-part-0" if job["pp"] > 1 else f"model-rank-{tp}-part-0"
    written = load_file(_state_folder(job) / f"{name}.safetensors")
    wanted = ShardedStateLoader._filter_subtensors(model.state_dict())
    odd = [f"{key} on one side only" for key in written.keys() ^ wanted.keys()]
    for key in written.keys() & wanted.keys():
        one, other = written[key], wanted[key].contiguous()
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            odd.append(f"{key}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}")
        elif not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            odd.append(f"{key}: other bytes")
    return sorted(odd)


def _packed(model: torch.nn.Module, config: Any, job: dict[str, Any]) -> str:
    """What conversion says of the state that vLLM saves of a model that is ready to compute."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from megastream.convert.forms import Options
    from megastream.convert.run import convert
    from megastream.convert.types import ConvertError

    process_weights_after_loading(model, config, torch.device("cpu"))
    folder = Path(f"{job['model']}-{job['name']}")
    folder.mkdir()
    ShardedStateLoader.save_model(model, str(folder))
    try:
        convert(folder, Path(f"{folder}-hf"), Options(config=Path(job["model"])), lambda done, total: None)
    except ConvertError as error:
        return str(error)
    return "taken"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
