"""One expert of the synthetic model, and checkpoints that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.helpers.synthetic import CONFIG, FAMILY, SHAPE, full_tensor

EXPERT = (1, 4)
NAMES = [f"model.layers.1.mlp.experts.4.{which}_proj.weight" for which in ("gate", "up", "down")]
UNIT = "s0.l1.e4:5"


def write(folder: Path, version: int = 0, **config: Any) -> Path:
    """The synthetic model at a version as a checkpoint, of which only the experts of layer 1 are there."""
    folder.mkdir(exist_ok=True)
    names = [spec.name for spec in FAMILY.tensors(SHAPE) if "layers.1.mlp.experts." in spec.name]
    save_file({name: full_tensor(name, version) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder
