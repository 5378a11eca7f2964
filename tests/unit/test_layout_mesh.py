"""Layout strings and who sits where; Megatron's own group generator is the oracle for ranks."""

from __future__ import annotations

import importlib
import inspect

import pytest

from megastream.layout.mesh import (
    Mesh,
    engine_coords,
    engine_stage_layers,
    parse_engine_mesh,
    parse_trainer_mesh,
    trainer_chunks,
    trainer_coords,
    trainer_stage_layers,
)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("tp2 etp1 pp4 ep8 dp4", Mesh(tp=2, etp=1, pp=4, ep=8, dp=4)),
        ("tp=2,etp=1,pp=4, ep=8,dp=4", Mesh(tp=2, etp=1, pp=4, ep=8, dp=4)),
        ("pp4(23,24,24,23)", Mesh(pp=4, stages=(23, 24, 24, 23))),
        ("pp=2(4, 3) ep2", Mesh(pp=2, ep=2, dp=2, stages=(4, 3))),
        ("tp2 ep2", Mesh(tp=2, etp=2, ep=2, dp=2)),
        ("", Mesh()),
        ("pp2(2,1,2,2) vpp2", Mesh(pp=2, vpp=2, stages=(2, 1, 2, 2))),
        ("vpp=2, pp=2(4,2)", Mesh(pp=2, vpp=2, stages=(2, 1, 2, 1))),
        ("pp2(Ett|t|tt|ttL) ep2", Mesh(pp=2, vpp=2, ep=2, dp=2, stages=(2, 1, 2, 2))),
        ("tp2 pp4(E|(t,t|)*2,L)", Mesh(tp=2, etp=2, pp=4, stages=(0, 2, 2, 0))),
        ("pp2(Et*3|ttmmL)", Mesh(pp=2, stages=(3, 2))),
        ("pp2(7,0)", Mesh(pp=2, stages=(7, 0))),
    ],
)
def test_trainer_strings(text: str, mesh: Mesh) -> None:
    assert parse_trainer_mesh(text) == mesh


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp2 tp4", "axis tp is given twice"),
        ("tp0", "axis tp has size 0"),
        ("tp", "cannot read 'tp'"),
        ("ep2 round_robin", "cannot read 'round_robin'; expected an axis of .* and a size$"),
        ("xp2", "expected an axis of tp, cp"),
        ("pp2(4,3,2)", "pp=2 lists 3 stage sizes"),
        ("pp3(4,0,3)", r"stages of \(4, 0, 3\) layers; each needs one above 0, but for the first and the last"),
        ("pp2(2,0,2,2) vpp2", "each needs one above 0"),
        ("ep2(1,1)", r"ep=2 lists \(1,1\); only pp has stages"),
        ("pp2(3,2) vpp2", "3 layers of a stage do not divide by vpp=2"),
        ("pp2(1,2,3) vpp2", "pp=2, vpp=2 lists 3 stage sizes; it needs one for each of 4 stages"),
        ("pp2(Et|t|L)", "pp=2 lists 3 stage sizes"),
        ("pp2(tt|tL)", "one E comes first and one L last"),
        ("pp3(|Et|tL)", "one E comes first"),
        ("pp3(Et|tm|L)", "m only beside L"),
        ("pp2(Et|mtL)", "m only beside L"),
        ("pp2(Ex|tL)", "cannot read 'x'; letters are E, t, m and L"),
        ("pp2(E(t*99999)*99999|L)", "more than 10000 letters"),
        ("pp2(Et*9999999|L)", r"cannot read '\*'"),
        ("vpp2", "vpp=2 needs pipeline stages, but pp=1"),
        ("pp2(4,3", r"cannot read 'pp2\(4'"),
        ("tp2 ep3 dp2", r"tp\*cp\*dp=4 does not divide by etp\*ep=6"),
    ],
)
def test_bad_trainer_strings(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_trainer_mesh(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp2 ep4", r"ep=4, tp\*dp=2; .* so write ep2, or ep1"),
        ("tp8 dp8 ep8", r"ep=8, tp\*dp=64; .* so write ep64, or ep1"),
        ("tp2 etp1", "etp=1; with tp=2, dp=1, ep=1 vLLM has etp=2"),
        ("tp=2,cp=2", "cp=2; an engine has tp, ep, pp and dp only"),
        ("pp2 vpp2", "vpp=2"),
        ("pp2(7,0)", r"stages of \(7, 0\) layers; each needs one above 0"),
        ("pp2(4)", "pp=2 lists 1 stage sizes"),
        ("tp2 round_robin", "round_robin deals experts out to the ranks .* of which there are ep=1; write ep2 too"),
        ("round_robin pp2", "ep=1; leave it out"),
        ("tp2 ep2 round_robin round_robin", "layout .*: round_robin is given twice"),
        ("tp2 ep2 round_robin2", "cannot read 'round_robin2'; expected an axis of .* and a size, or round_robin"),
        ("tp2 ep2 roundrobin", "cannot read 'roundrobin'"),
        ("tp2 ep2 pp2(4, round_robin)", r"cannot read \(4, round_robin\)"),
        ("pp2(Et|tL)", r"cannot read \(Et\|tL\); give the layers of each stage in numbers"),
    ],
)
def test_bad_engine_strings(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_engine_mesh(text)


def test_layers_of_stages() -> None:
    """L13. Even and uneven stages, interleaving, and vLLM's remainder rule (all but the last stage, from behind)."""
    for num_layers in range(7, 13):
        for pp in (2, 3, 4):
            for vpp in (1, 2, 3):
                mesh = Mesh(pp=pp, vpp=vpp)
                if num_layers % (pp * vpp):
                    with pytest.raises(ValueError, match=rf"{num_layers} layers do not divide by pp\*vpp={pp * vpp}"):
                        trainer_stage_layers(mesh, num_layers, 0)
                    continue
                stages = [trainer_stage_layers(mesh, num_layers, stage) for stage in range(pp)]
                assert sorted(layer for stage in stages for layer in stage) == list(range(num_layers))
    assert trainer_stage_layers(Mesh(pp=2, vpp=2), 8, 0) == (0, 1, 4, 5)
    assert trainer_stage_layers(Mesh(pp=2, vpp=2), 8, 1) == (2, 3, 6, 7)
    assert [len(trainer_stage_layers(Mesh(pp=3, stages=(3, 2, 2)), 7, s)) for s in range(3)] == [3, 2, 2]
    both = Mesh(pp=2, vpp=2, stages=(0, 3, 2, 1))
    assert [trainer_chunks(both, 6, stage) for stage in (0, 1)] == [[(), (3, 4)], [(0, 1, 2), (5,)]]
    with pytest.raises(ValueError, match=r"\(4, 4\) hold 8 layers, the model has 7"):
        trainer_stage_layers(Mesh(pp=2, stages=(4, 4)), 7, 0)
    for pp, sizes in ((2, [4, 3]), (3, [2, 3, 2]), (4, [2, 2, 2, 1]), (5, [1, 1, 2, 2, 1])):
        assert [len(engine_stage_layers(Mesh(pp=pp), 7, stage)) for stage in range(pp)] == sizes


@pytest.mark.full
def test_engine_layers_equal_vllm() -> None:
    get_pp_indices = importlib.import_module("vllm.distributed.utils").get_pp_indices
    for num_layers in range(4, 14):
        for pp in range(1, 5):
            for stage in range(pp):
                ours = engine_stage_layers(Mesh(pp=pp), num_layers, stage)
                assert ours == tuple(range(*get_pp_indices(num_layers, stage, pp)))


@pytest.mark.full
@pytest.mark.parametrize(
    "text", ["tp2 ep2", "tp2 etp1 ep2 dp1", "tp4 etp2 ep2", "etp2 ep2 dp4", "tp2 etp1 pp2 ep4 dp4"]
)
def test_ranks_equal_megatron(text: str) -> None:
    """L24: expert groups, not dense ones, say who owns a slice of an expert."""
    generator = importlib.import_module("megatron.core.parallel_state").RankGenerator
    mesh = parse_trainer_mesh(text)
    edp = mesh.tp * mesh.dp // (mesh.etp * mesh.ep)
    dense = generator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=1, order="tp-cp-ep-dp-pp")
    expert = generator(tp=mesh.etp, ep=mesh.ep, dp=edp, pp=mesh.pp, cp=1, order="tp-cp-ep-dp-pp")
    coords = [trainer_coords(mesh, rank) for rank in range(mesh.world_size)]
    for ranks, group, axis in ((dense, "tp", "tp"), (dense, "dp", "dp"), (dense, "pp", "pp"), (expert, "tp", "etp")):
        for members in ranks.get_ranks(group):
            assert [coords[rank][axis] for rank in members] == list(range(len(members)))
    for group, axis in (("ep", "ep"), ("dp", "edp")):
        for members in expert.get_ranks(group):
            assert [coords[rank][axis] for rank in members] == list(range(len(members)))


def test_engine_ranks() -> None:
    mesh = parse_engine_mesh("tp2 ep2 pp2")
    assert [(c["pp"], c["tp"], c["ep"], c["etp_size"]) for c in (engine_coords(mesh, rank) for rank in range(4))] == [
        (0, 0, 0, 1),
        (0, 1, 1, 1),
        (1, 0, 0, 1),
        (1, 1, 1, 1),
    ]


def test_engine_ranks_with_data_parallelism() -> None:
    """vLLM's order: tp fastest, then pp, then dp; experts are dealt over dp and tp of one stage, or cut by both."""
    mesh = parse_engine_mesh("tp2 dp2 pp2 ep4")
    assert mesh.world_size == 8
    coords = [engine_coords(mesh, rank) for rank in range(8)]
    assert [(c["dp"], c["pp"], c["tp"]) for c in coords] == [(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)]
    for stage in (0, 1):
        assert [c["ep"] for c in coords if c["pp"] == stage] == [0, 1, 2, 3]
    cut = [engine_coords(parse_engine_mesh("tp2 dp2"), rank) for rank in range(4)]
    assert [(c["tp"], c["etp"]) for c in cut] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert {(c["etp_size"], c["ep_size"]) for c in cut} == {(4, 1)}


@pytest.mark.full
def test_engine_expert_groups_equal_vllm() -> None:
    """Rank numbers reshaped and transposed as vLLM's `initialize_model_parallel` does it for its expert group."""
    torch = importlib.import_module("torch")
    source = inspect.getsource(importlib.import_module("vllm.distributed.parallel_state").initialize_model_parallel)
    assert "all_ranks.transpose(1, 2)" in source, "vLLM builds its expert groups in another way: look at it again"
    mesh = parse_engine_mesh("tp2 dp3 pp2 ep6")
    ranks = torch.arange(12).reshape(-1, 3, 2, 1, 2)  # as there: external dp, dp, pp, pcp, tp
    for group in ranks.transpose(1, 2).reshape(-1, 6).tolist():
        coords = [engine_coords(mesh, rank) for rank in group]
        assert [c["ep"] for c in coords] == list(range(6)) and len({c["pp"] for c in coords}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "tp1",
        "tp2 etp1 ep8 dp4 pp2",
        "tp4 etp1 ep4 dp4",
        "tp2 pp2(25,23)",
        "tp1 cp2 ep4 dp2",
        "tp2 dp2 pp2 vpp3",
        "tp1 pp3(0,3,0)",
        "tp1 pp2(2,1,2,2) vpp2",
    ],
)
def test_a_printed_trainer_layout_is_read_back(text: str) -> None:
    mesh = parse_trainer_mesh(text)
    assert parse_trainer_mesh(str(mesh)) == mesh and str(mesh) == text


@pytest.mark.parametrize(
    "text",
    [
        "tp1",
        "tp4 pp2",
        "tp4 etp1 ep4",
        "tp2 pp2(3,1)",
        "tp8 etp1 ep64 dp8",
        "tp2 etp4 dp2",
        "tp2 etp1 ep4 dp2 pp2(3,1) round_robin",
    ],
)
def test_a_printed_engine_layout_is_read_back(text: str) -> None:
    mesh = parse_engine_mesh(text)
    assert parse_engine_mesh(str(mesh)) == mesh and str(mesh) == text
