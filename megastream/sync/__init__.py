"""The two facades: TrainerSync on every trainer rank, EngineSync beside the engine. All that a framework imports."""

from megastream.protocol.journal import EnginePoisoned, SyncError
from megastream.sync.binding import TrainerModel
from megastream.sync.engine import EngineSync, EngineSyncSettings, WholeUpdate
from megastream.sync.opening import Opening
from megastream.sync.trainer import TrainerSync
from megastream.trainer.settings import TrainerSettings

__all__ = [
    "EnginePoisoned",
    "EngineSync",
    "EngineSyncSettings",
    "Opening",
    "SyncError",
    "TrainerModel",
    "TrainerSettings",
    "TrainerSync",
    "WholeUpdate",
]
