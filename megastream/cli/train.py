"""`megastream train`: a training from a file, alone or with an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train_command(
    config: Annotated[Path, typer.Argument(help="The YAML file of the training, e.g. configs/train.yaml.")],
) -> None:
    """Trains a Hugging Face checkpoint on all ranks of the file, and streams to an engine if the file names one.

    Start it once on every node; it starts the node's ranks. Under torchrun it is one of the ranks itself.
    """
    from megastream.rl.torchrun import run_train

    raise typer.Exit(run_train(config))
