"""`megastream swap-expert`: another expert for a running engine. `megastream swap`: what swaps cost, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def swap_expert_command(
    layer: Annotated[int, typer.Option(help="The layer, as in the checkpoint's names of tensors.")],
    expert: Annotated[int, typer.Option(help="The routed expert of that layer.")],
    source: Annotated[Path, typer.Option("--from", help="Hugging Face checkpoint that has the expert.")],
    redis_url: Annotated[str, typer.Option(help="The control plane of the engine.")] = "redis://127.0.0.1:6379",
    run_id: Annotated[str, typer.Option(help="The run id of the engine.")] = "run",
    engine: Annotated[str, typer.Option(help="Name of the engine; needed where several are up.")] = "",
    deadline_s: Annotated[float, typer.Option(min=1.0, help="Longest time of one wait, in seconds.")] = 60.0,
) -> None:
    """Replace one expert of a running engine by that of a checkpoint, between two steps, as a version of its own.

    Name the old checkpoint to take it back. Refused while a trainer is attached to an engine of the run.
    """
    from megastream.rl.swap_expert import run_swap_expert

    raise typer.Exit(
        run_swap_expert(source, layer, expert, redis_url=redis_url, run_id=run_id, engine=engine, deadline_s=deadline_s)
    )


def swap_command(
    config: Annotated[Path, typer.Argument(help="The YAML file of the experiment, e.g. configs/swap.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default runs/<name of the file>.")] = None,
) -> None:
    """Swap experts of one checkpoint into a vLLM that answers with another's, and measure what it costs.

    Starts the engine itself; requests are made live or replayed. Results as JSON, CSV and an HTML page: bytes that are
    live early, tokens that met two versions, gaps, and how far logprobs are from those of the strict gate.
    """
    from megastream.rl.swap_launch import run_swap

    raise typer.Exit(run_swap(config, out))
