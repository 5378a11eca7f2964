"""The `megastream` command. Thin: each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastream import __version__
from megastream.cli.convert import convert_command, verify_command
from megastream.cli.plan import plan_command
from megastream.cli.serve import OPTIONS, serve_command
from megastream.cli.swap import swap_command, swap_expert_command
from megastream.cli.train import train_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("plan")(plan_command)
app.command("convert")(convert_command)
app.command("verify")(verify_command)
app.command("train")(train_command)
app.command("serve", context_settings=OPTIONS)(serve_command)
app.command("swap-expert")(swap_expert_command)
app.command("swap")(swap_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megastream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Streams the weights of a Megatron MoE trainer into a running vLLM engine."""


@app.command()
def quickstart(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run, e.g. configs/quickstart.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default runs/<name of the file>.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Use this Redis or Valkey instead of one started for the run.")
    ] = None,
    engine_layout: Annotated[str | None, typer.Option(help="pp2 or tp2ep, instead of the file's.")] = None,
) -> None:
    """Trains a small MoE model while vLLM generates with it, once streamed and once the whole-model way."""
    from megastream.rl.launch import run_quickstart

    raise typer.Exit(run_quickstart(config, out, redis_url=redis_url, engine_layout=engine_layout))


if __name__ == "__main__":
    app()
