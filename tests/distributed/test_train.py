"""`megastream train`: from Hugging Face weights, interrupted and resumed, and what it refuses."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megastream.trainer.checkpoint_folder import CheckpointFolder, Manifest
from megastream.trainer.checkpoint_index import index_faults
from tests.helpers.tiny import tiny_glm4
from tests.helpers.train_job import STEPS, job, lines, run, trace, whole_checkpoints, write_files

ONE = {"rendezvous__ranks_per_node": 1, "layout__pp": 1, "layout__ep": 1}


@pytest.mark.full
def test_a_training_in_two_parts_is_the_training_in_one(tmp_path: Path) -> None:
    """Also without the layout staying the same: weights and moments are exact, sums come in another order."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        write_files(folder)
    assert run(job(whole)) == [""] * 4
    assert run(job(parts, run__steps=4)) == [""] * 4
    assert run(job(parts)) == [""] * 4
    assert trace(parts) == trace(whole) and len(trace(whole)) == STEPS
    assert [line["learning_rate"] for line in lines(parts) if line["kind"] == "step"] == [
        line["learning_rate"] for line in lines(whole) if line["kind"] == "step"
    ]
    starts = [(line["step"], line["same_layout"]) for line in lines(parts) if line["kind"] == "start"]
    assert starts == [(0, False), (4, True)]
    assert whole_checkpoints(parts) == [6, 8], "keep = 2"


@pytest.mark.full
def test_layout_features_of_the_file_are_trained_and_resumed(tmp_path: Path) -> None:
    features: dict[str, Any] = dict(
        layout={"pp": 2, "cp": 2, "stage_layers": [3, 1], "recompute": "full", "overlap_grad_reduce": True},
        batch__per_token_loss=True,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        write_files(folder)
    assert run(job(whole, **features)) == [""] * 4
    assert run(job(parts, run__steps=4, **features)) == [""] * 4
    assert run(job(parts, **features)) == [""] * 4
    assert trace(parts) == trace(whole) and len(trace(whole)) == STEPS


@pytest.mark.full
@pytest.mark.parametrize(("finality", "clip"), [("speculative", 0.5), ("speculative", 1e6), ("early", 0.0)])
def test_a_policy_that_steps_early_saves_what_pipelined_saves(tmp_path: Path, finality: str, clip: float) -> None:
    """With every step undone once, with none, and without clipping; in two parts, every tensor of the end equal."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        write_files(folder)
    clipped = {"optimizer__clip_grad": clip}
    assert run(job(whole, **clipped)) == [""] * 4
    changed = {**clipped, "finality": finality, "max_abort_rate": 1.0}
    assert run(job(parts, **changed, run__steps=4)) == [""] * 4
    assert run(job(parts, **changed)) == [""] * 4
    assert trace(parts) == trace(whole) and len(trace(whole)) == STEPS
    expected, found = (plain(folder / "run/checkpoints/step_00000008") for folder in (whole, parts))
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.full
def test_routers_biases_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    """GLM-4.5: in two parts with every step undone once; a bias rate of zero leaves them as they were loaded."""
    folders = whole, parts, still = tmp_path / "whole", tmp_path / "parts", tmp_path / "still"
    for folder in folders:
        write_files(folder, tiny_glm4)
    assert run(job(whole)) == [""] * 4
    changed = {"finality": "speculative", "max_abort_rate": 1.0}
    assert run(job(parts, **changed, run__steps=4)) == [""] * 4
    assert run(job(parts, **changed)) == [""] * 4
    assert run(job(still, optimizer__router_bias_rate=0.0)) == [""] * 4
    assert trace(parts) == trace(whole) and len(trace(whole)) == STEPS
    expected, found, unmoved = (plain(folder / "run/checkpoints/step_00000008") for folder in folders)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    biases = {name: tensor for name, tensor in expected.items() if name.endswith("router.expert_bias")}
    loaded = load_file(whole / "weights/model.safetensors")
    assert len(biases) == 3
    for name, bias in biases.items():
        start = loaded[f"model.layers.{name.split('.')[2]}.mlp.gate.e_score_correction_bias"]
        assert torch.equal(unmoved[name], start)
        moved = (bias - start).abs()
        assert moved.any() and float(moved.max()) <= STEPS * 1.01e-3


@pytest.mark.full
def test_multi_token_prediction_is_trained_and_resumed(tmp_path: Path) -> None:
    """And refused where the family's table has no rows for it."""
    whole, parts, qwen3 = folders = tmp_path / "whole", tmp_path / "parts", tmp_path / "qwen3"
    for folder in folders[:2]:
        write_files(folder, tiny_glm4, mtp_layers=1)
    assert run(job(whole, layout__mtp_layers=1)) == [""] * 4
    assert run(job(parts, layout__mtp_layers=1, run__steps=4)) == [""] * 4
    assert run(job(parts, layout__mtp_layers=1)) == [""] * 4
    assert trace(parts) == trace(whole) and len(trace(whole)) == STEPS
    assert any(".eh_proj." in name for name in plain(whole / "run/checkpoints/step_00000008"))
    write_files(qwen3)
    said = set(run(job(qwen3, **ONE, layout__mtp_layers=1), 1))
    assert len(said) == 1 and "trainer setting mtp_layers=1 is not supported: " in said.pop()


def prepared(tmp_path: Path, **changes: Any) -> Path:
    """A folder with checkpoints of steps 2 and 4, made by one rank."""
    write_files(tmp_path)
    assert run(job(tmp_path, run__steps=4, **ONE, **changes), 1) == [""]
    assert whole_checkpoints(tmp_path) == [2, 4]
    return tmp_path / "run" / "checkpoints"


def refused(tmp_path: Path, num_ranks: int = 1, **changes: Any) -> str:
    """What every rank says, all the same; nothing is trained."""
    before = len(trace(tmp_path))
    said = set(run(job(tmp_path, **{**ONE, "rendezvous__ranks_per_node": num_ranks, **changes}), num_ranks))
    assert len(said) == 1 and len(trace(tmp_path)) == before
    return said.pop()


@pytest.mark.full
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    prepared(tmp_path)
    write_files(tmp_path / "hidden", hidden=64)
    write_files(tmp_path / "vocab", vocab=110)
    said = refused(tmp_path, weights=str(tmp_path / "hidden" / "weights"))
    assert "model.hidden is 48 there and 64 here" in said and "step_00000004" in said
    said = refused(tmp_path, weights=str(tmp_path / "vocab" / "weights"))
    assert "model.vocab is 102 there and 110 here" in said
    said = refused(tmp_path, optimizer__learning_rate=0.5, batch__global_sequences=16)
    assert "batch.global_sequences is 8 there and 16 here, optimizer.learning_rate is 0.001 there and 0.5 here" in said
    assert run(job(tmp_path, **ONE, optimizer__learning_rate=0.5, checkpoint__allow_changed=["optimizer"]), 1) == [""]
    said = refused(tmp_path, checkpoint__load="none")
    assert "is there already" in said
    folder = tmp_path / "run" / "checkpoints"
    said = refused(tmp_path, checkpoint__load=str(folder / "step_00000006"), checkpoint__allow_changed=["optimizer"])
    assert "step_00000006 is older than step_00000008 beside it" in said
    assert "2 ranks were started, the file's rendezvous has 1" in run(job(tmp_path, **ONE), 2)[1]


@pytest.mark.full
def test_a_folder_in_use_and_a_missing_shard_are_refused(tmp_path: Path) -> None:
    """An error of one rank is the word of all of them, and nobody hangs."""
    folder = prepared(tmp_path)
    other = CheckpointFolder(folder)
    other.open(1)
    said = refused(tmp_path, 2, layout__ep=2, deadlines__save_s=0.5)
    assert "is in use by another trainer for 0.5 s" in said
    other.close()
    next((folder / "step_00000004").glob("*.distcp")).unlink()
    said = refused(tmp_path, 2, layout__ep=2, checkpoint__load=str(folder / "step_00000004"))
    assert "no checkpoint to load" in said and ".distcp is missing" in said
    shutil.rmtree(folder / "step_00000002")
    said = refused(tmp_path, 2, layout__ep=2)
    assert ".distcp is missing" in said and "begin anew" in said


def test_the_newest_whole_one_is_picked(tmp_path: Path) -> None:
    """4 is whole, 20 empty, 30 has no manifest, 40 lacks one byte, 50 has one wrong byte, 60 is a copy of 4."""
    folder = prepared(tmp_path)
    shutil.rmtree(folder / "step_00000002")
    (folder / "step_00000020").mkdir()
    for step in (30, 40, 50, 60):
        copy = shutil.copytree(folder / "step_00000004", folder / f"step_000000{step}")
        if step < 60:
            text = (copy / "manifest.json").read_text()
            (copy / "manifest.json").write_text(text.replace('"step": 4,', f'"step": {step},', 1))
    (folder / "step_00000030" / "manifest.json").unlink()
    shard = next((folder / "step_00000040").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    wrong = next((folder / "step_00000050").glob("*.distcp"))
    content = bytearray(wrong.read_bytes())
    content[len(content) // 2] ^= 1
    wrong.write_bytes(content)
    assert run(job(tmp_path, run__steps=6, **ONE), 1) == [""]
    start = [line for line in lines(tmp_path) if line["kind"] == "start"][-1]
    assert start["resumed"].endswith("step_00000004") and start["step"] == 4
    reasons = " | ".join(start["refused"])
    assert "step_00000060 is of step 4, as its manifest.json says" in reasons
    assert "step_00000050: file" in reasons and "does not have the checksum" in reasons
    assert "step_00000040: file" in reasons and "the manifest says" in reasons
    assert "step_00000030 has no manifest.json" in reasons and "step_00000020 has no manifest.json" in reasons
    assert whole_checkpoints(tmp_path) == [4, 6], "what was passed over takes the place of none"
    assert (folder / "CURRENT").read_text() == "step_00000006\n"
    assert len(list(folder.glob("refused-step_*"))) == 5


@pytest.mark.full
def test_an_index_that_is_not_of_these_files_is_a_fault(tmp_path: Path) -> None:
    """Nothing is published, or loaded, whose index names other bytes than are there."""
    folder = prepared(tmp_path) / "step_00000004"
    sizes = {name: size for name, (size, _) in Manifest.read(folder).files.items()}
    assert list(index_faults(folder, sizes)) == []
    data = sorted(name for name in sizes if name.endswith(".distcp"))
    assert any("which is not there" in fault for fault in index_faults(folder, {n: sizes[n] for n in data[1:]}))
    assert any("up to byte" in fault for fault in index_faults(folder, {**sizes, data[0]: sizes[data[0]] - 400_000}))
    assert list(index_faults(folder, {**sizes, "__9_0.distcp": 1})) == ["file __9_0.distcp is not in the index"]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(key for key in metadata.state_dict_metadata if ".exp_avg." in key)
    metadata.state_dict_metadata[name].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert [name in fault for fault in index_faults(folder, sizes)] == [True]


@pytest.mark.full
def test_weights_alone_begin_a_new_training(tmp_path: Path) -> None:
    """Step 0, no moments, masters equal to the loaded weights; its own checkpoints come first once it has some."""
    folder = prepared(tmp_path)
    changes = {"run__folder": str(tmp_path / "new" / "run"), "checkpoint__load": str(folder / "step_00000004")}
    raw = job(tmp_path, **ONE, **changes, run__steps=2, checkpoint__weights_only=True, optimizer__learning_rate=1e-9)
    assert run(raw, 1) == [""]
    start = [line for line in lines(tmp_path / "new") if line["kind"] == "start"][-1]
    assert start["step"] == 0 and start["resumed"].endswith("step_00000004")
    old, new = (plain(path) for path in (folder / "step_00000004", tmp_path / "new/run/checkpoints/step_00000002"))
    for name, tensor in old.items():
        if name.startswith("optimizer.state.param."):
            weights = old[name.removeprefix("optimizer.state.param.")]
            assert torch.allclose(new[name], weights.float(), atol=1e-6), "masters were reset to the weights"
        if name.startswith("optimizer.state.exp_avg_sq."):
            assert not torch.equal(new[name], tensor)
    assert run({**raw, "run": {**raw["run"], "steps": 4}}, 1) == [""]
    assert [line["step"] for line in lines(tmp_path / "new") if line["kind"] == "start"] == [0, 2]


def plain(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as torch's own reader gives it."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    return found


LAYOUTS = [
    ("tp2 ep2", dict(layout__pp=1, layout__tp=2, layout__etp=1, rendezvous__ranks_per_node=2), 2),
    ("ep4", dict(layout__pp=1, layout__ep=4), 4),
    ("one micro-batch", dict(batch__micro_sequences=4), 4),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "changes", "num_ranks"), LAYOUTS)
def test_a_training_goes_on_in_another_layout(
    tmp_path: Path, name: str, changes: dict[str, Any], num_ranks: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        write_files(folder)
    assert run(job(whole, dtype="float32")) == [""] * 4
    assert run(job(parts, dtype="float32", run__steps=4)) == [""] * 4
    assert run(job(parts, dtype="float32", **changes), num_ranks) == [""] * num_ranks
    assert [line["same_layout"] for line in lines(parts) if line["kind"] == "start"] == [False, False]
    for step, values in trace(whole).items():
        (expected,), (found,) = values, trace(parts)[step]
        assert found == pytest.approx(expected, rel=1e-4), step
