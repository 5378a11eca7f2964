"""`megastream train` and torchrun: starts the ranks of this node, or is one of them.

python -m megastream.rl.torchrun CONFIG      one rank, under torchrun

The ranks of all nodes meet at `rendezvous.address` under the run's id, in torchrun's own store: nothing lies in a file
that an earlier run could have left.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megastream.protocol.control import ControlError
from megastream.rl.children import PR_SET_PDEATHSIG
from megastream.rl.train_config import ConfigError, TrainConfig, load_train_config
from megastream.sync import SyncError
from megastream.trainer.agreement import AgreedError

if TYPE_CHECKING:
    from megastream.rl.place import Place

FAILED, REFUSED = 1, 2
_NODE = "MEGASTREAM_NODE_FOLDER"
"""In the ranks' environment: the folder of this start on this node."""


def run_train(path: Path) -> int:
    """The command: one rank when torchrun started it, else the launcher of this node. Returns the exit code."""
    if "RANK" in os.environ:
        return run_rank(path)
    try:
        config = load_train_config(path)
    except ConfigError as error:
        print(f"megastream: {error}", file=sys.stderr)
        return REFUSED
    return _launch(path, config)


def run_rank(path: Path) -> int:
    """One rank, at the place that torchrun's environment names. What all ranks raise is said once."""
    # A launcher that is killed leaves nothing behind, and one that is interrupted speaks for its ranks.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from megastream.rl.place import Place
    from megastream.rl.train_run import train

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place(rank, ranks, "env://")
    try:
        train(_config_of(path, place), place)
    except AgreedError as error:
        if _speaks(rank):
            print(f"megastream: {error}", file=sys.stderr)
        return FAILED
    except (SyncError, ControlError, TimeoutError, ValueError, OSError, RuntimeError) as error:
        print(f"megastream: trainer rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return 0


def _config_of(path: Path, place: Place) -> TrainConfig:
    """AgreedError on all ranks when the file is wrong here; ConfigError when they do not come to hear it."""
    try:
        return load_train_config(path)
    except ConfigError as error:
        with suppress(RuntimeError):  # what torch.distributed raises where nobody comes
            place.refuse(str(error))
        raise


def _speaks(rank: int) -> bool:
    """Whether this rank says what all of them raise: the first of the first node that comes to it.

    torchrun ends the slower ones, rank 0 perhaps, before they can speak.
    """
    folder = os.environ.get(_NODE)
    if folder is None:  # another launcher than ours
        return rank == 0
    if os.environ["GROUP_RANK"] != "0":
        return False
    try:
        Path(folder, "failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _launch(path: Path, config: TrainConfig) -> int:
    """torchrun writes into a folder of this start, which goes with it; the ranks of this node share it."""
    with tempfile.TemporaryDirectory(prefix="megastream-train-") as folder:
        os.environ[_NODE] = folder
        return _launch_in(folder, path, config)


def _launch_in(folder: str, path: Path, config: TrainConfig) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    meeting = config.rendezvous
    try:
        elastic_launch(agent_config(config, folder), sys.executable)("-m", "megastream.rl.torchrun", str(path))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megastream: trainer rank {rank} ended first, with exit code {failure.exitcode}", file=sys.stderr)
        return FAILED
    except SignalException as error:
        print(f"megastream: {error.sigval.name}: the ranks of this node were stopped", file=sys.stderr)
        return 128 + error.sigval
    except (RendezvousError, TimeoutError) as error:
        met = any(Path(folder).glob("*/attempt_*"))  # torchrun's folders of ranks that it started
        where = "another node ended first" if met else f"{meeting.nodes} nodes did not meet at {meeting.address}"
        print(f"megastream: {where}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except RuntimeError as error:
        print(f"megastream: the launcher of this node failed: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return 0


def agent_config(config: TrainConfig, folder: str) -> Any:
    """torch's LaunchConfig; torchrun's own files go into `folder`.

    `start_s` ends both waits: for the first node's store, and there for the other nodes.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    meeting, start_s = config.rendezvous, math.ceil(config.deadlines.start_s)
    return LaunchConfig(
        min_nodes=meeting.nodes,
        max_nodes=meeting.nodes,
        nproc_per_node=meeting.ranks_per_node,
        run_id=config.run.id,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.address,
        rdzv_configs={"join_timeout": start_s, "read_timeout": start_s},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
