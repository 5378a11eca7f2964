"""Every tensor that a worker's model can be found to hold beside its parameters, wherever it hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megastream.engine.digest import tensor_digest

OTHER = ("kv_cache", "_output")
"""Keys and values, whose digests say nothing of weights; what the last step left behind."""
DEEPEST = 5


class Tensors:
    """A part of the worker extension. Knows nothing of what the product looks at."""

    def feed_tensors(self) -> dict[str, str]:
        """Path -> digest of buffers, of attributes of modules, and of what hangs below them in lists, dicts and objects
        of vLLM's; parameters are left out where the modules name them, and in where something else holds them, or where
        a module has made them behind the load."""
        return {path: tensor_digest(tensor) for path, tensor in self._feed_held().items()}

    def feed_places(self) -> dict[str, int]:
        """Where each of these lies, and each parameter."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found = self._feed_held() | dict(model.named_parameters())
        return {path: tensor.data_ptr() for path, tensor in found.items()}

    def feed_reload(self, folder: str) -> None:
        """vLLM's own reload from a folder, as a paused update makes it."""
        live = self.weight_transfer_engine.state.live  # type: ignore[attr-defined]
        names = {tensor.name for tensor in live.describe_whole().tensors}
        stored = load_file(f"{folder}/model.safetensors")
        live.load_whole((name, tensor) for name, tensor in stored.items() if name in names)

    def _feed_held(self) -> dict[str, torch.Tensor]:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found: dict[str, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            loaded = get_layerwise_info(module).restore_metadata[0]
            made = {name: each for name, each in module._parameters.items() if name not in loaded}
            for name, value in (vars(module) | module._buffers | made).items():
                if name not in ("_parameters", "_buffers", *OTHER):
                    found.update(_below(value, f"{prefix}.{name}", {id(module)}, DEEPEST))
        return found

    def feed_expert_maps(self) -> list[list[int]]:
        """Global expert -> local slot, or -1, of every layer that has experts, as vLLM's own modules keep it."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        maps = (dict(module.named_buffers(recurse=False)).get("_expert_map") for module in model.modules())
        return [each.tolist() for each in maps if each is not None]


def _below(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    if isinstance(value, torch.Tensor | torch.nn.Module) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    for name, inner in _inside(value):
        if name not in OTHER:
            yield from _below(inner, f"{path}.{name}", seen, depth - 1)


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | set):
        return list(enumerate(value))
    if type(value).__module__.startswith("vllm.") and not isinstance(value, type):
        return list(getattr(value, "__dict__", {}).items())
    return []
