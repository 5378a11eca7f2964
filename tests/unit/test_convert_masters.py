"""`convert --from-masters`: the fp32 masters of a distributed checkpoint in the place of its bf16 weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, write_hf


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """By torch's own reader."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if "_extra_state" not in name
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def write(folder: Path, weights: Path, masters: Path, prefix: str, without: str = "") -> Path:
    """As megatron saves both: the optimizers of dense weights and of experts are chained."""
    state = stored(weights)
    for key, value in stored(masters).items():
        if key != without:
            chain = f"chained_{int('experts' in key)}." if prefix.startswith("chained") else ""
            name = chain + prefix.removeprefix("chained.")
            state[f"{name}.{key}"] = value
            state[f"{name.rpartition('.')[0]}.exp_avg.{key}"] = torch.full_like(value, 7.0)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("prefix", ["optimizer.state.param", "chained.optimizer.state.fp32_param"])
def test_masters_take_the_place_of_their_weights(tmp_path: Path, prefix: str) -> None:
    """A router that no optimizer steps has none, and stays what it is."""
    wide = write_hf(tmp_path / "wide", layers=2, experts=2, top_k=1, dtype=torch.float32)
    narrow = converted(wide, tmp_path / "narrow", dtype="bfloat16")
    folders = [converted(folder, tmp_path / f"{folder.name}-dist", "torch_dist") for folder in (narrow, wide)]
    both = write(tmp_path / "both", *folders, prefix)

    def weights(name: str, **options: Any) -> bytes:
        target = converted(both, tmp_path / name, config=wide, **options)
        said = json.loads((target / "config.json").read_text())["torch_dtype"]
        assert said == ("bfloat16" if options.get("dtype") else "float32")
        return (target / "model.safetensors").read_bytes()

    assert weights("masters", from_masters=True) == (wide / "model.safetensors").read_bytes()
    assert weights("rounded", from_masters=True, dtype="bfloat16") == (narrow / "model.safetensors").read_bytes()
    assert weights("plain") == (narrow / "model.safetensors").read_bytes()


def test_what_has_no_master_is_taken_itself(tmp_path: Path) -> None:
    wide = write_hf(tmp_path / "wide", layers=2, experts=2, top_k=1, dtype=torch.float32)
    dist = converted(wide, tmp_path / "dist", "torch_dist")
    nines = tmp_path / "nines"
    dcp.save(
        {key: torch.full_like(value, 9.0) for key, value in stored(dist).items()}, checkpoint_id=nines, no_dist=True
    )
    both = write(tmp_path / "both", nines, dist, "optimizer.state.param", without="decoder.layers.1.mlp.router.weight")
    back = stored(converted(both, tmp_path / "back", "torch_dist", config=wide, from_masters=True))
    for key, value in stored(dist).items():
        assert back[key].eq(9.0).all() if key == "decoder.layers.1.mlp.router.weight" else back[key].equal(value), key


def test_weights_do_not_resume_masters(tmp_path: Path) -> None:
    """The files that would be written are the same, and so are those that are read."""
    wide = write_hf(tmp_path / "wide", layers=2, experts=2, top_k=1, dtype=torch.float32)
    dist = converted(wide, tmp_path / "dist", "torch_dist")
    both, target = write(tmp_path / "both", dist, dist, "optimizer.state.param"), tmp_path / "target"

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    plain = Options(config=wide)
    with pytest.raises(KeyboardInterrupt):
        convert(both, target, plain, interrupt)
    with pytest.raises(ConvertError, match="is of another source, target or option; leave --resume out"):
        convert(both, target, replace(plain, from_masters=True), lambda done, total: None, resume=True)
    convert(both, target, plain, lambda done, total: None, resume=True)


def test_where_there_are_none_it_is_refused(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=2, top_k=1)
    with pytest.raises(ConvertError, match="is hf; --from-masters is for torch_dist"):
        converted(source, tmp_path / "x", from_masters=True)
    dist = converted(source, tmp_path / "dist", "torch_dist")
    with pytest.raises(ConvertError, match=r"holds no fp32 masters by parameters \(optimizer.state.param.\*\); leave"):
        converted(dist, tmp_path / "x", from_masters=True)
