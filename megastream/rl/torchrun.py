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
from pathlib import Path
from typing import Any

from megastream.protocol.control import ControlError
from megastream.rl.children import PR_SET_PDEATHSIG
from megastream.rl.train_config import ConfigError, TrainConfig, load_train_config
from megastream.sync import SyncError
from megastream.trainer.agreement import AgreedError

FAILED, REFUSED = 1, 2


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
    """One rank, at the place that torchrun's environment names. Errors of all ranks are said by rank 0 only.

    Before the ranks have met, the first of each node speaks: a file may be missing on one node alone.
    """
    import torch.distributed as dist

    from megastream.rl.train_run import Place, train

    # A launcher that is killed leaves nothing behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        train(load_train_config(path), Place(rank, ranks, "env://"))
    except (AgreedError, ConfigError) as error:
        if rank == 0 or (os.environ["LOCAL_RANK"] == "0" and not dist.is_initialized()):
            print(f"megastream: {error}", file=sys.stderr)
        return FAILED
    except (SyncError, ControlError, TimeoutError, ValueError, OSError, RuntimeError) as error:
        print(f"megastream: trainer rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return 0


def _launch(path: Path, config: TrainConfig) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    meeting = config.rendezvous
    try:
        elastic_launch(agent_config(config), sys.executable)("-m", "megastream.rl.torchrun", str(path))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megastream: trainer rank {rank} ended first, with exit code {failure.exitcode}", file=sys.stderr)
        return FAILED
    except SignalException as error:
        print(f"megastream: {error.sigval.name}: the ranks of this node were stopped", file=sys.stderr)
        return 128 + error.sigval
    except (RendezvousError, TimeoutError) as error:
        where = f"{meeting.nodes} nodes did not meet at {meeting.address}"
        print(f"megastream: {where}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except RuntimeError as error:
        print(f"megastream: the launcher of this node failed: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return 0


def agent_config(config: TrainConfig) -> Any:
    """torch's LaunchConfig. `start_s` ends both waits: for the first node's store, and there for the other nodes."""
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
    )


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
