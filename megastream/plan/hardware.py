"""Hardware profiles: every number that the cost model needs, each with the place that it was taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sourced:
    """A number and where it is from; "assumed" says that nobody measured it."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of machine. Rates are those of one rank (one GPU with its part of the network)."""

    name: str
    lane_bytes_per_s: Sourced
    """One rank sends or receives so much, and both at once."""
    piece_s: Sourced
    """Fixed time of one message, on the rank that sends or receives it."""
    memory_bytes_per_s: Sourced
    """Device memory, read and written bytes added."""
    host_bytes_per_s: Sourced
    """From page-locked host memory to the device."""
    peak_flops_per_s: Sourced
    utilization: Sourced
    """Part of the peak that a backward reaches."""
    microbatch_tokens: Sourced
    """Tokens of the last microbatch, on one data-parallel rank."""
    load_tensor_s: Sourced
    """vLLM's own weight reload, for each Hugging Face tensor that a rank holds a part of."""
    pause_s: Sourced
    """Fixed part of vLLM's pause and resume."""
    idle_share: Sourced
    """Part of the experts that recent batches hardly used, by bytes."""


_TENSOR = Sourced(
    170e-6,
    "measured: vLLM 0.26.0, one H200, Qwen3-30B-A3B shapes, load_weights with its layerwise session: 163 to 178 us a "
    "tensor; up to twice that on a slower host",
)
_PAUSE = Sourced(0.02, "read in vLLM 0.26.0: pause_generation sleeps 20 ms")
_FLOPS = Sourced(989.4e12, "NVIDIA H100 and H200 SXM data sheets: bf16 without sparsity")
_HOST = Sourced(
    64e9 * 0.85, "NVIDIA H100 and H200 SXM data sheets: PCIe Gen5, 128 GB/s both ways; 85 % of one way assumed"
)
_PIECE = Sourced(
    100e-6,
    "measured: ipc lane between two H200, packed, 16 MiB: 149 us a piece, 46 of them for its bytes; work of hosts, "
    "so assumed to be that elsewhere",
)
_UTILIZATION = Sourced(0.35, "assumed")
_TOKENS = Sourced(4096, "assumed")
_IDLE = Sourced(0.5, "assumed")

PROFILES: dict[str, Hardware] = {
    profile.name: profile
    for profile in (
        Hardware(
            name="h100-ib",
            lane_bytes_per_s=Sourced(
                43e9,
                "DeepEP's README: 43 GB/s of at most 50 GB/s over one ConnectX-7 (400 Gb/s) a GPU; DGX H100: one "
                "such port for each of 8 GPUs",
            ),
            piece_s=_PIECE,
            memory_bytes_per_s=Sourced(3.35e12 * 0.88, "NVIDIA H100 SXM data sheet: 3.35 TB/s; 88 % as on an H200"),
            host_bytes_per_s=_HOST,
            peak_flops_per_s=_FLOPS,
            utilization=_UTILIZATION,
            microbatch_tokens=_TOKENS,
            load_tensor_s=_TENSOR,
            pause_s=_PAUSE,
            idle_share=_IDLE,
        ),
        Hardware(
            name="h200-nvlink",
            lane_bytes_per_s=Sourced(368e9, "measured: NCCL 2.28.9 send and receive of 1 GiB between two H200"),
            piece_s=_PIECE,
            memory_bytes_per_s=Sourced(4.25e12, "measured: device-to-device copy on an H200, read and write"),
            host_bytes_per_s=_HOST,
            peak_flops_per_s=_FLOPS,
            utilization=_UTILIZATION,
            microbatch_tokens=_TOKENS,
            load_tensor_s=_TENSOR,
            pause_s=_PAUSE,
            idle_share=_IDLE,
        ),
    )
}


def profile(name: str) -> Hardware:
    """ValueError names the profiles there are."""
    if name not in PROFILES:
        raise ValueError(f"hardware {name!r} has no profile; known: {', '.join(sorted(PROFILES))}")
    return PROFILES[name]
