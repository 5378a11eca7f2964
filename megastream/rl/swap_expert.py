"""`megastream swap-expert`: one expert of a running engine becomes that of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from megastream.control.redis_log import RedisLog
from megastream.protocol.control import ControlError
from megastream.protocol.journal import SyncError
from megastream.sync.swap import swap
from megastream.trainer.checkpoint_experts import CheckpointExperts


def run_swap_expert(
    folder: Path, layer: int, expert: int, *, redis_url: str, run_id: str, engine: str, deadline_s: float
) -> int:
    """Returns the exit status; what stands against it is one line on standard error."""
    try:
        tensors = CheckpointExperts(folder, [(layer, expert)])
        log = RedisLog(redis_url, run_id, reconnect_s=deadline_s)
        try:
            done = swap(log, tensors, engine=engine, deadline_s=deadline_s)
        finally:
            log.close()
    except (ValueError, ControlError, SyncError) as error:
        print(f"megastream swap-expert: {error}", file=sys.stderr)
        return 1
    print(
        f"engine {done.engine}: expert {expert} of layer {layer} is that of {folder} from version {done.version} on; "
        f"all else is as in version {done.over} ({done.payload_bytes:,} bytes, {1e3 * done.stall_s:.1f} ms in a call "
        f"between two steps)"
    )
    return 0
