"""The configuration of `megastream swap`: one YAML file, typed. What cannot be is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megastream.rl.bounds import BOUNDS, bounds_refusal
from megastream.rl.sections import ConfigError, Section, check_positive, read_mapping, typed

GateName = Literal["version", "idle_experts"]
MOST_CASES = 1000


class EngineConfig(Section, frozen=True, kw_only=True):
    """vLLM's side. `idle_uses` and `early_units` as in the engine's settings, for gate `idle_experts`."""

    layout: Literal["single", "pp2", "tp2ep"] = "pp2"
    max_model_len: int
    kv_cache_mib: int
    idle_uses: float = 1.0
    early_units: int = 16


class TrafficConfig(Section, frozen=True, kw_only=True):
    """Requests without a break. `requests` are in flight at a time; `skew` is Zipf's exponent with which they choose
    among so many `prompts`, 0 for all alike. Lengths count tokens."""

    requests: tuple[int, ...]
    skew: tuple[float, ...]
    prompts: int
    prompt_tokens: int
    answer_tokens: int


class ReplayConfig(Section, frozen=True, kw_only=True):
    """Recorded requests, each once: those of a `file` (`swap_replay`), at their times divided by each `speed`."""

    file: str
    speed: tuple[float, ...] = (1.0,)


class SwapsConfig(Section, frozen=True, kw_only=True):
    """What is swapped while they run: so many `experts` of every layer that has some, `swaps` times (an even number, so
    that the model is back at the end), one every `tokens_between` tokens. A version's experts leave one behind the
    other within `emission_s`, as those of a training step do."""

    experts: tuple[int, ...]
    gates: tuple[GateName, ...] = ("version", "idle_experts")
    swaps: int
    tokens_between: int
    emission_s: float


class DeadlineConfig(Section, frozen=True, kw_only=True):
    """Seconds."""

    start_s: float
    step_s: float
    case_s: float
    reconnect_s: float
    stop_s: float


class SwapConfig(Section, frozen=True, kw_only=True):
    """A whole file. `model` is served; `other`, of the same shape, lends its experts. Hugging Face folders.
    The requests are those of either `traffic` or `replay`."""

    seed: int
    model: str
    other: str
    engine: EngineConfig
    traffic: TrafficConfig | None = None
    replay: ReplayConfig | None = None
    swap: SwapsConfig
    deadlines: DeadlineConfig


@dataclass(frozen=True, slots=True)
class Case:
    """Requests and what is done to the engine meanwhile: either so many `requests` at a time with a `skew`, or a replay
    at a `speed`. Without experts nothing is swapped: gate and experts are of no use."""

    requests: int | None = None
    skew: float | None = None
    speed: float | None = None
    experts: int = 0
    gate: str = "none"

    def __str__(self) -> str:
        asked = f"replay at speed {self.speed:g}" if self.speed else f"{self.requests} at a time, skew {self.skew:g}"
        number = "1 expert" if self.experts == 1 else f"{self.experts} experts"
        swapped = f"{number} of each layer by gate {self.gate}" if self.experts else "nothing swapped"
        return f"{asked}, {swapped}"


def cases_of(config: SwapConfig, experts: int) -> Iterator[Case]:
    """Those that swap so many experts; those without a swap for 0."""
    traffic, replay = config.traffic, config.replay
    asked = [Case(speed=speed) for speed in replay.speed] if replay else []
    if traffic:
        asked += [Case(requests, skew) for requests in traffic.requests for skew in traffic.skew]
    for case in asked:
        for gate in config.swap.gates if experts else ("none",):
            yield replace(case, experts=experts, gate=gate)


def load_swap_config(path: Path) -> SwapConfig:
    """Reads and checks a file. ConfigError says in one line what is wrong and where."""
    raw = read_mapping(path)
    try:
        return parse_swap_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_swap_config(raw: dict[str, Any]) -> SwapConfig:
    """A checked configuration from plain data."""
    config = typed(raw, SwapConfig)
    check_positive(config, {"seed", "swap.emission_s"})
    if reason := bounds_refusal(config, bounds=_BOUNDS):
        raise ConfigError(reason)
    if (config.traffic is None) == (config.replay is None):
        raise ConfigError("give one of the sections traffic and replay")
    if config.traffic:
        _check_traffic(config.traffic, config.engine.max_model_len)
    if config.replay:
        _check_list("replay.speed", config.replay.speed, 1e-6, 1e6)
    swap = config.swap
    _check_list("swap.experts", swap.experts, 1, BOUNDS["model.experts"][1])
    _check_list("swap.gates", swap.gates)
    if swap.swaps % 2:
        raise ConfigError(f"swap.swaps is {swap.swaps}; an even number brings the model back for the next case")
    count = sum(len([*cases_of(config, experts)]) for experts in (0, *swap.experts))
    if count > MOST_CASES:
        raise ConfigError(f"the lists of requests and swap make {count} cases; at most {MOST_CASES} are run")
    return config


def _check_traffic(traffic: TrafficConfig, max_model_len: int) -> None:
    _check_list("traffic.requests", traffic.requests, 1, BOUNDS["engine.streams"][1])
    _check_list("traffic.skew", traffic.skew, 0, 100)
    if traffic.prompt_tokens + traffic.answer_tokens >= max_model_len:
        raise ConfigError(
            f"traffic.prompt_tokens + traffic.answer_tokens are {traffic.prompt_tokens + traffic.answer_tokens}; "
            f"engine.max_model_len = {max_model_len} needs at least one more"
        )


def _check_list(name: str, values: tuple[Any, ...], least: float | None = None, most: float = math.inf) -> None:
    if not values or len(set(values)) != len(values):
        raise ConfigError(f"{name} is {list(values)}; give at least one value, and each once")
    for value in values if least is not None else ():
        if not least <= value <= most:  # also NaN
            raise ConfigError(f"{name} has {value}; each must be from {least:g} to {most:g}")


_BOUNDS: dict[str, tuple[float, float]] = {
    "seed": BOUNDS["seed"],
    "engine.max_model_len": BOUNDS["engine.max_model_len"],
    "engine.kv_cache_mib": BOUNDS["engine.kv_cache_mib"],
    "engine.early_units": (1, 1 << 20),
    "traffic.prompts": (1, 1_000_000),
    "swap.swaps": (2, 100_000),
    "swap.tokens_between": (1, 10**9),
    "swap.emission_s": (0, 3600),
    **{f"deadlines.{name}": (0.1, 1e6) for name in DeadlineConfig.__struct_fields__},
}
