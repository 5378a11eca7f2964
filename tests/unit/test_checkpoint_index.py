"""The index of a checkpoint against its files and the names of what was to be saved, on what torch itself writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dist

from megastream.trainer.checkpoint_index import NAMES, index_faults, write_names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_that_the_index_forgot_is_missed_though_its_file_is_named(tmp_path: Path) -> None:
    torch_dist.save({"one": torch.ones(3, 4), "other": torch.ones(5)}, checkpoint_id=tmp_path, no_dist=True)
    write_names(tmp_path, ["other", "one"])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert list(index_faults(tmp_path, sizes)) == []
    index = tmp_path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    del metadata.state_dict_metadata["other"]
    metadata.storage_data = {key: place for key, place in metadata.storage_data.items() if key.fqn != "other"}
    index.write_bytes(pickle.dumps(metadata))
    assert list(index_faults(tmp_path, sizes)) == ["the index does not hold other, which was to be saved"]
    del sizes[NAMES]  # what earlier versions saved
    assert list(index_faults(tmp_path, sizes)) == [], "nothing else would show it"
