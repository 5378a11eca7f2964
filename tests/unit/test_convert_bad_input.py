"""Bad input from the command line: exit code 2, one line that names what is wrong and what to do, and nothing lost.

The cases are said one by one in the tests of the forms; here each kind of them goes through the command, with a target
that stands already.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megastream.cli.main import app
from tests.helpers.convert_models import converted, tensors_of, write_hf

INDEX = "model.safetensors.index.json"
NAME = "model.layers.1.self_attn.q_norm.weight"
FIRST_LACKING = "model.layers.0.mlp.experts.2.down_proj.weight"
Q_NORM = "decoder.layers.1.self_attention.q_layernorm.weight"


@dataclass(frozen=True)
class Case:
    """`make` leaves the folder to be converted in `tmp`; the line has each of `words`, one of them the remedy."""

    make: Callable[[Path], Path]
    words: tuple[str, ...]
    options: tuple[str, ...] = ()


def whole(tmp: Path) -> Path:
    return write_hf(tmp / "source", layers=2, experts=4)


def sharded(tmp: Path) -> Path:
    return converted(write_hf(tmp / "hf", layers=2, experts=4), tmp / "source", max_file_bytes=30_000)


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> Path:
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file)
    return folder


def cut_off(tmp: Path) -> Path:
    source = sharded(tmp)
    path = file_of(source, NAME)
    os.truncate(path, path.stat().st_size - 6)
    return source


def corrupt(tmp: Path) -> Path:
    source = sharded(tmp)
    path = file_of(source, NAME)
    path.write_bytes(path.read_bytes()[:8] + b"\xff" + path.read_bytes()[9:])
    return source


def file_missing(tmp: Path) -> Path:
    source = sharded(tmp)
    file_of(source, NAME).unlink()
    return source


def shards_overlap(tmp: Path) -> Path:
    """The index places a tensor in one file, and another file has it too."""
    source = sharded(tmp)
    other = next(path.name for path in sorted(source.glob("*.safetensors")) if path != file_of(source, NAME))
    return edited(source, lambda tensors: tensors.update({NAME: torch.zeros(8).bfloat16()}), other)


def shards_overlap_without_index(tmp: Path) -> Path:
    source = shards_overlap(tmp)
    (source / INDEX).unlink()
    return source


def shards_leave_a_hole(tmp: Path) -> Path:
    source = sharded(tmp)
    (source / INDEX).unlink()
    file_of_name = next(path for path in source.glob("*.safetensors") if NAME in load_file(path))
    file_of_name.unlink()
    return source


def ranks_leave_a_hole(tmp: Path) -> Path:
    source = converted(whole(tmp).rename(tmp / "hf"), tmp / "source", "torch_dist")
    (source / "__0_0.distcp").unlink()
    return source


def ranks(tmp: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Files of two ranks, of which the last one is edited."""
    source = converted(whole(tmp).rename(tmp / "hf"), tmp / "source", "mp_rank", to_layout="tp2 etp1 ep2")
    path = source / "mp_rank_01_001" / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    edit(stored["model"])
    torch.save(stored, path)
    return source


def half_of(form: str, name: str, layout: str | None = None) -> Callable[[Path], Path]:
    """A folder of a form in which one file is cut off."""

    def make(tmp: Path) -> Path:
        source = converted(whole(tmp).rename(tmp / "hf"), tmp / "source", form, to_layout=layout)
        os.truncate(source / name, (source / name).stat().st_size // 2)
        return source

    return make


def state(tmp: Path) -> Path:
    return converted(whole(tmp).rename(tmp / "hf"), tmp / "source", "sharded_state", to_layout="tp2 ep2")


def redundant(tmp: Path) -> Path:
    """As an engine saves it that has two experts twice."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        stacks = {name: tensor for name, tensor in tensors.items() if "routed_experts" in name}
        tensors.update({name: torch.cat([stack, stack[:1]]) for name, stack in stacks.items()})

    source = state(tmp)
    for rank in (0, 1):
        edited(source, add, f"model-rank-{rank}-part-0.safetensors")
    return source


def unequal_replicas(tmp: Path) -> Path:
    return ranks(tmp, lambda model: model[Q_NORM][5].fill_(77.0))


def unequal_engine_replicas(tmp: Path) -> Path:
    source = converted(whole(tmp).rename(tmp / "hf"), tmp / "source", "sharded_state", to_layout="tp2")
    return edited(source, lambda tensors: tensors[NAME][5].fill_(77.0), "model-rank-1-part-0.safetensors")


def colliding_layers(tmp: Path) -> Path:
    """One layer under two names, as when two chunks were merged into one."""
    return ranks(tmp, lambda model: model.update({f"module.{Q_NORM}": model[Q_NORM].clone()}))


def layer_beyond(tmp: Path) -> Path:
    return ranks(tmp, lambda model: model.update({Q_NORM.replace("layers.1", "layers.2"): model[Q_NORM]}))


def unequal_tied(tmp: Path) -> Path:
    source = write_hf(tmp / "source", tied=True)
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][4, 5] += 1
    save_file(tensors, source / "model.safetensors")
    return source


CASES = {
    "a truncated file": Case(cut_off, (".safetensors has", "cut off", "fetch it again")),
    "a corrupt file": Case(corrupt, (".safetensors has a header that is no JSON", "fetch it again")),
    "an index that names a missing file": Case(file_missing, (INDEX, "which is not there; fetch it")),
    "shards that overlap": Case(shards_overlap, (NAME, ".safetensors", INDEX, "take all of one save")),
    "shards that overlap, no index": Case(
        shards_overlap_without_index, (NAME, "is in model-", " and in model-", "keep one of the files")
    ),
    "shards that leave a hole": Case(shards_leave_a_hole, ("(hf) lacks", FIRST_LACKING, "fetch the rest of it")),
    "a distributed checkpoint with a hole": Case(ranks_leave_a_hole, ("__0_0.distcp", "cannot be read")),
    "a truncated file of a rank": Case(
        half_of("mp_rank", "mp_rank_01_001/model_optim_rng.pt", "tp2 etp1 ep2"),
        ("mp_rank_01_001/model_optim_rng.pt", "a damaged one", "save it again"),
    ),
    "a truncated distributed checkpoint": Case(
        half_of("torch_dist", "__0_0.distcp"), ("__0_0.distcp", "a damaged one", "save it again")
    ),
    "a truncated index of one": Case(half_of("torch_dist", ".metadata"), (".metadata", "damaged", "save it again")),
    "a truncated file of an engine's rank": Case(
        half_of("sharded_state", "model-rank-1-part-0.safetensors", "tp2"),
        ("model-rank-1-part-0.safetensors", "cut off", "fetch it again"),
    ),
    "unequal replicas": Case(
        unequal_replicas, (f"{NAME}[5]", "77", "of rank 0 in", "mp_rank_01_001", "take the files of one save")
    ),
    "unequal replicas of an engine": Case(
        unequal_engine_replicas, (f"{NAME}[5]", "77", "of rank 0 in", "of rank 1 in", "take the files of one save")
    ),
    "tied weights with two values": Case(
        unequal_tied, ("model.embed_tokens.weight[4, 5]", "lm_head.weight in", "take the files of one save")
    ),
    "colliding layers": Case(colliding_layers, ("mp_rank_01_001", f"two parameters are {Q_NORM}", "save it again")),
    "a layer beyond the others": Case(
        layer_beyond, ("mp_rank_01_001", "layers.2.", "beyond the 2 layers of this stage", "is the layout right?")
    ),
    "more stages than layers": Case(
        whole, ("tp1 pp3", "2 layers", "give the layers of every stage"), ("--to", "mp_rank", "--to-layout", "pp3")
    ),
    "more engine stages than layers": Case(
        whole, ("tp1 pp3", "3 stages for 2 layers", "each needs one"), ("--to", "sharded_state", "--to-layout", "pp3")
    ),
    "more ranks than experts": Case(
        lambda tmp: write_hf(tmp / "source", layers=2, experts=2, top_k=1),
        ("ep4", "2 experts for ep=4 ranks", "each needs one"),
        ("--to", "sharded_state", "--to-layout", "tp4 ep4"),
    ),
    "data-parallel ranks of an engine, which share experts": Case(
        whole,
        ("tp1 ep2 dp2", "dp=2 ranks would share each", "leave dp out", "--to hf"),
        ("--to", "sharded_state", "--to-layout", "dp2 ep2"),
    ),
    "data-parallel ranks of an engine, which cut experts": Case(
        whole,
        ("tp2 etp4 dp2", "dp=2 ranks would share each", "leave dp out"),
        ("--to", "sharded_state", "--to-layout", "tp2 dp2"),
    ),
    "experts in turns": Case(
        whole,
        (
            "ep2 round_robin",
            "no file of sharded_state says which expert lies where",
            "leave round_robin out",
            "--to hf",
        ),
        ("--to", "sharded_state", "--to-layout", "tp2 ep2 round_robin"),
    ),
    "files of experts in turns": Case(
        state,
        ("ep2 round_robin", "no file of sharded_state says which expert lies where"),
        ("--from-layout", "tp2 ep2 round_robin"),
    ),
    "redundant experts": Case(
        redundant,
        ("model-rank-0-part-0.safetensors", "_weight has 3 slots", "has 2 of 4 experts", "placed linearly"),
    ),
    "more trainer ranks than experts": Case(
        whole, ("ep8", "4 experts do not divide by ep=8"), ("--to", "mp_rank", "--to-layout", "ep8")
    ),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(tmp: Path, source: Path, words: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Converts onto a target that stands, and looks at both."""
    target = tmp / "target"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"what was there before")
    before = files_of(source), files_of(target), sorted(path.name for path in tmp.iterdir())
    done = CliRunner().invoke(app, ["convert", str(source), str(target), *options])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.exception or done.output
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("megastream convert: ")
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert (files_of(source), files_of(target), sorted(path.name for path in tmp.iterdir())) == before


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_lost(tmp_path: Path, case: str) -> None:
    made = CASES[case]
    refused(tmp_path, made.make(tmp_path), made.words, ("--overwrite", *made.options))


def test_a_target_that_exists(tmp_path: Path) -> None:
    refused(tmp_path, whole(tmp_path), (str(tmp_path / "target"), "exists", "--overwrite"), ())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files can be made at their size, and after 100 kB nothing can be written."""
    written, real = [0], os.pwrite

    def write(descriptor: int, data: bytes, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    yield
    assert written[0] > 100_000, "it was never full"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"what was there before")
    before = files_of(source), files_of(target)
    done = CliRunner().invoke(app, ["convert", str(source), str(target), "--overwrite"])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert f"{target}: the disk is full; make room, and go on with --resume" in done.stderr
    assert (files_of(source), files_of(target)) == before


def test_a_target_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = whole(tmp_path)

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "target")])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert f"{tmp_path / 'target'} cannot be written (Read-only file system); choose another target" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("first", [True, False])
def test_verify_refuses_what_is_unfit(tmp_path: Path, first: bool) -> None:
    """Exit code 2, not the 1 of a difference, whichever of the two it is."""
    fit = write_hf(tmp_path / "fit", layers=2, experts=4)
    unfit = cut_off(tmp_path)
    pair = (unfit, fit) if first else (fit, unfit)
    done = CliRunner().invoke(app, ["verify", *map(str, pair)])
    assert done.exit_code == 2 and "cut off" in done.stderr and str(unfit) in done.stderr
    assert len(done.stderr.splitlines()) == 1
