"""`megastream serve`: vLLM's own server, after a look at what its updates need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A YAML file of `vllm serve` options, e.g. configs/serve.yaml.")],
) -> None:
    """Becomes `vllm serve --config CONFIG`, with all further options, if that vLLM can take a trainer's weights.

    Looks at vLLM's version and name, at the plugin, and at the options that updates need. Adds nothing else.
    """
    from megastream.rl.serve import run_serve

    raise typer.Exit(run_serve(config, context.args))
