"""Meshes and layout strings: `tp2 etp1 pp4 ep8 dp4`, `tp=2,etp=1`, uneven stages `pp4(23,24,24,23)`; of an engine also
`tp4 ep4 round_robin`.

With `vpp` the trainer's stages are given one by one in the order in which a token passes them, `pp2(2,1,2,2) vpp2`, or
for each rank, `pp2(4,2) vpp2`; or both in Megatron's letters, `pp2(Ett|t|tt|ttL)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd

from megastream.layout.expert_slots import Placement
from megastream.layout.placing import Cut
from megastream.layout.stages import checked, pipeline_layout, spread, uneven_stages

AXES = ("tp", "cp", "etp", "ep", "dp", "pp", "vpp")
_AXIS = re.compile(r"([a-z]+)=?([0-9]{1,6})(?:\(((?:[^()]|\([^()]*\))*)\))?(?=[\s,]|$)")
_WORD = re.compile(r"[a-z_]+(?=[\s,]|$)")
_SEPARATOR = re.compile(r"[\s,]+")
_NUMBERS = re.compile(r"[0-9,\s]*")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes of one side. `stages`: decoder layers of every pipeline stage when they are uneven; with `vpp`,
    of every virtual one in the order in which a token passes them. `placement`: which experts lie on which engine rank,
    with expert parallelism.
    """

    tp: int = 1
    cp: int = 1
    etp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    stages: tuple[int, ...] | None = None
    placement: Placement = "linear"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        """In the syntax of layout strings: parsed again, it is this mesh."""
        usual = {"tp": 0, "etp": self.tp}  # tp is always said
        sizes = {axis: size for axis in AXES if (size := getattr(self, axis)) != usual.get(axis, 1)}
        stages = f"({','.join(map(str, self.stages))})" if self.stages else ""
        words = [f"{axis}{size}{stages if axis == 'pp' else ''}" for axis, size in sizes.items()]
        return " ".join(words if self.placement == "linear" else [*words, self.placement])


def coords_cut(coords: Mapping[str, int], axis: str) -> Cut:
    """The cut of a rank on an axis. ValueError when `coords` lacks the axis or its size."""
    if axis not in coords or f"{axis}_size" not in coords:
        raise ValueError(f"mesh coordinates {dict(coords)} lack {axis} or {axis}_size")
    return Cut(axis, coords[axis], coords[f"{axis}_size"])


def parse_trainer_mesh(text: str) -> Mesh:
    """Megatron's mesh. `etp` defaults to `tp`; `dp` to the smallest that lets tp*cp*dp divide by etp*ep. Its first and
    last stage may have 0 layers: embedding, norm and head are there.

    ValueError restates the text and names the axis and both numbers that do not fit.
    """
    sizes, inside = _parse(text)
    tp, cp, ep = sizes.get("tp", 1), sizes.get("cp", 1), sizes.get("ep", 1)
    etp = sizes.get("etp", tp)
    dp = sizes.get("dp", etp * ep // gcd(etp * ep, tp * cp))
    if tp * cp * dp % (etp * ep):
        raise ValueError(f"trainer layout {text!r}: tp*cp*dp={tp * cp * dp} does not divide by etp*ep={etp * ep}")
    pp, (vpp, stages) = sizes.get("pp", 1), _trainer_stages(text, sizes, inside)
    if vpp > 1 and pp == 1:
        raise ValueError(
            f"trainer layout {text!r}: vpp={vpp} needs pipeline stages, but pp=1; raise pp or leave vpp out"
        )
    return Mesh(tp, cp, etp, ep, dp, pp, vpp, stages)


def parse_engine_mesh(text: str) -> Mesh:
    """vLLM's mesh: tp, pp, dp, and ep, which is off (1) or tp*dp. Without it vLLM cuts experts tp*dp times; with it the
    word round_robin is its `expert_placement_strategy`.

    ValueError restates the text, names what vLLM does not have, and the ep that it would have.
    """
    sizes, inside = _parse(text, ("round_robin",))
    for axis in ("cp", "vpp"):
        if sizes.get(axis, 1) != 1:
            raise ValueError(f"engine layout {text!r}: {axis}={sizes[axis]}; an engine has tp, ep, pp and dp only")
    tp, dp, ep = sizes.get("tp", 1), sizes.get("dp", 1), sizes.get("ep", 1)
    if ep not in (1, tp * dp):
        raise ValueError(
            f"engine layout {text!r}: ep={ep}, tp*dp={tp * dp}; vLLM's expert parallelism spans tp and dp, so write "
            f"ep{tp * dp}, or ep1 to have experts cut {tp * dp} times instead"
        )
    etp = 1 if ep > 1 else tp * dp
    if sizes.get("etp", etp) != etp:
        raise ValueError(
            f"engine layout {text!r}: etp={sizes['etp']}; with tp={tp}, dp={dp}, ep={ep} vLLM has etp={etp}"
        )
    placement: Placement = "round_robin" if "round_robin" in sizes else "linear"
    if placement != "linear" and ep == 1:
        remedy = f"write ep{tp * dp} too" if tp * dp > 1 else "leave it out"
        raise ValueError(
            f"engine layout {text!r}: {placement} deals experts out to the ranks of expert parallelism, of which there "
            f"are ep={ep}; {remedy}"
        )
    return Mesh(tp, 1, etp, ep, dp, sizes.get("pp", 1), 1, _engine_stages(text, sizes, inside), placement)


def trainer_coords(mesh: Mesh, rank: int) -> dict[str, int]:
    """Coordinates in Megatron's default order tp-cp-ep-dp-pp (tp fastest; experts: etp, ep, edp, pp)."""
    inner = mesh.tp * mesh.cp * mesh.dp
    pp, rest = divmod(rank, inner)
    edp_size = inner // (mesh.etp * mesh.ep)
    return {
        "tp": rest % mesh.tp,
        "tp_size": mesh.tp,
        "cp": rest // mesh.tp % mesh.cp,
        "cp_size": mesh.cp,
        "dp": rest // (mesh.tp * mesh.cp),
        "dp_size": mesh.dp,
        "etp": rest % mesh.etp,
        "etp_size": mesh.etp,
        "ep": rest // mesh.etp % mesh.ep,
        "ep_size": mesh.ep,
        "edp": rest // (mesh.etp * mesh.ep),
        "edp_size": edp_size,
        "pp": pp,
        "pp_size": mesh.pp,
    }


def engine_coords(mesh: Mesh, rank: int) -> dict[str, int]:
    """Coordinates of an engine rank in vLLM's order tp-pp-dp (tp fastest).

    With expert parallelism experts are numbered over dp and tp, dp first; without it they are cut in that order.
    """
    rest, tp = divmod(rank, mesh.tp)
    dp, pp = divmod(rest, mesh.pp)
    expert = dp * mesh.tp + tp
    return {
        "tp": tp,
        "tp_size": mesh.tp,
        "dp": dp,
        "dp_size": mesh.dp,
        "etp": expert if mesh.etp > 1 else 0,
        "etp_size": mesh.etp,
        "ep": expert if mesh.ep > 1 else 0,
        "ep_size": mesh.ep,
        "pp": pp,
        "pp_size": mesh.pp,
    }


def trainer_stage_layers(mesh: Mesh, num_layers: int, stage: int) -> tuple[int, ...]:
    """Global layers of a Megatron stage; with vpp, chunk c of stage s follows chunk c of stage s - 1."""
    return tuple(chain.from_iterable(trainer_chunks(mesh, num_layers, stage)))


def trainer_chunks(mesh: Mesh, num_layers: int, stage: int) -> list[tuple[int, ...]]:
    """Likewise, of each virtual stage of it; there is one without vpp."""
    stages = mesh.stages
    if stages is None:
        if num_layers % (mesh.pp * mesh.vpp):
            raise ValueError(
                f"trainer layout {mesh}: {num_layers} layers do not divide by pp*vpp={mesh.pp * mesh.vpp}; "
                "give the layers of every stage, e.g. pp2(4,3)"
            )
        stages = uneven_stages(num_layers, mesh.pp, mesh.vpp)
    return [_explicit(stages, num_layers, chunk * mesh.pp + stage, "trainer") for chunk in range(mesh.vpp)]


def engine_stage_layers(mesh: Mesh, num_layers: int, stage: int) -> tuple[int, ...]:
    """Global layers of a vLLM stage: remainder layers go to stages before the last (vllm get_pp_indices)."""
    if mesh.stages is not None:
        return _explicit(mesh.stages, num_layers, stage, "engine")
    if mesh.pp > num_layers:
        raise ValueError(f"engine layout {mesh}: {mesh.pp} stages for {num_layers} layers; each needs one")
    sizes = [num_layers // mesh.pp] * mesh.pp
    for index in range(2, num_layers % mesh.pp + 2):
        sizes[-index] += 1
    return _explicit(tuple(sizes), num_layers, stage, "engine")


def _explicit(stages: tuple[int, ...], num_layers: int, stage: int, side: str) -> tuple[int, ...]:
    if sum(stages) != num_layers:
        raise ValueError(f"{side} layout: stages {stages} hold {sum(stages)} layers, the model has {num_layers}")
    start = sum(stages[:stage])
    return tuple(range(start, start + stages[stage]))


def _parse(text: str, words: Sequence[str] = ()) -> tuple[dict[str, int], str | None]:
    """Sizes by axis, and 1 for each of these `words` that is there; and what stands in parentheses behind pp."""
    sizes: dict[str, int] = {}
    inside: str | None = None
    at = 0
    while at < len(text):
        if gap := _SEPARATOR.match(text, at):
            at = gap.end()
            continue
        key, size, listed, at = _token(text, at, words)
        what = key if key in words else f"axis {key}"
        if key in sizes or size < 1:
            raise ValueError(f"layout {text!r}: {what} " + ("is given twice" if key in sizes else "has size 0"))
        sizes[key] = size
        if listed is not None:
            if key != "pp":
                raise ValueError(f"layout {text!r}: {key}={size} lists ({listed}); only pp has stages")
            inside = listed
    return sizes, inside


def _token(text: str, at: int, words: Sequence[str]) -> tuple[str, int, str | None, int]:
    """(axis, size, what it lists, where it ends) of the axis at `at`, or of the word, which has size 1."""
    word, axis = _WORD.match(text, at), _AXIS.match(text, at)
    if word is not None and word[0] in words:
        return word[0], 1, None, word.end()
    if axis is None or axis[1] not in AXES:
        raise ValueError(
            f"layout {text!r}: cannot read {_SEPARATOR.split(text[at:])[0]!r}; expected an axis of {', '.join(AXES)} "
            f"and a size{''.join(f', or {each}' for each in words)}"
        )
    return axis[1], int(axis[2]), axis[3], axis.end()


def _trainer_stages(text: str, sizes: Mapping[str, int], inside: str | None) -> tuple[int, tuple[int, ...] | None]:
    """vpp, and the layers of every (virtual) stage."""
    pp, vpp = sizes.get("pp", 1), sizes.get("vpp", 1)
    if inside is None:
        return vpp, None
    try:
        if not _NUMBERS.fullmatch(inside):
            stages = pipeline_layout(inside)
            vpp = sizes.get("vpp", max(len(stages) // pp, 1))  # letters say it themselves
        else:
            stages = _numbers(inside)
            stages = spread(stages, vpp) if len(stages) == pp else stages
        _check_stages(len(stages), pp, vpp)
        return vpp, checked(stages, f"pp={pp}")
    except ValueError as error:
        raise ValueError(f"trainer layout {text!r}: {error}") from error


def _engine_stages(text: str, sizes: Mapping[str, int], inside: str | None) -> tuple[int, ...] | None:
    if inside is None:
        return None
    try:
        if not _NUMBERS.fullmatch(inside):
            raise ValueError(f"cannot read ({inside}); give the layers of each stage in numbers")
        stages = _numbers(inside)
        _check_stages(len(stages), sizes["pp"])
        if 0 in stages:
            raise ValueError(f"stages of {stages} layers; each needs one above 0")
        return stages
    except ValueError as error:
        raise ValueError(f"engine layout {text!r}: {error}") from error


def _numbers(inside: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", inside))


def _check_stages(num: int, pp: int, vpp: int = 1) -> None:
    if num != pp * vpp:
        also = f", vpp={vpp}" if vpp > 1 else ""
        raise ValueError(f"pp={pp}{also} lists {num} stage sizes; it needs one for each of {pp * vpp} stages")
