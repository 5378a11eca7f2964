"""What a rank does for itself: it reads the layouts of all, builds the plan of all, and proves its own part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megastream.layout.columns import ShardColumns
from megastream.layout.wire import decode_layout, decode_layouts, encode_layout
from megastream.plan import CoverageError, build_plan
from megastream.plan.coverage import prove
from megastream.plan.pieces import PieceTable, piece_table
from megastream.plan.types import Piece, Plan
from megastream.protocol.book import TrainerBook
from megastream.protocol.records import Emitted
from megastream.protocol.terms import ProtocolError
from tests.helpers.edits import replace
from tests.helpers.layout_reference import Model, config
from tests.helpers.layout_world import World, make_world

SIZES = dict(num_hidden_layers=3, num_experts=4, hidden_size=16, vocab_size=70, moe_intermediate_size=8)


def world(engine: str = "tp2 ep2", **options: object) -> World:
    model = Model(config(**SIZES))
    return make_world(model, "ep2 pp2", engine, trainer_stages=(2, 1), engine_stages=(3,), bucket=400, **options)


def build(plant: World, own: tuple[str, int] | None = None, **layouts: list) -> Plan:
    return build_plan(
        layouts.get("trainer", plant.trainer),
        layouts.get("engine", plant.engine),
        plant.model.family,
        kind="stream",
        piece_bytes=500,
        experts_per_unit=2,
        finality="pipelined",
        own=own,
    )


@pytest.mark.parametrize("ownership", ["replica", "slice"])
def test_every_rank_builds_the_same_plan_from_bytes(ownership: str) -> None:
    """Digest, numbers and pieces are those of the plan that is proved as a whole."""
    plant = world(ownership=ownership)
    whole = build(plant)
    blobs = {side: [encode_layout(each) for each in getattr(plant, side)] for side in ("trainer", "engine")}
    for side, blobs_of_side in blobs.items():
        for rank in range(len(blobs_of_side)):
            plan = build(plant, (side, rank), **{name: decode_layouts(raw) for name, raw in blobs.items()})
            assert plan == whole
            mine, all_of_it = (
                getattr(each, f"by_{'source' if side == 'trainer' else 'target'}") for each in (plan, whole)
            )
            assert mine[rank] == all_of_it[rank]


def table(plan: Plan, edit: Callable[[list[Piece], int], None], seq: int) -> PieceTable:
    pieces = list(plan.pieces)
    edit(pieces, seq)
    assert isinstance(plan.pieces, PieceTable)
    return piece_table(pieces, plan.pieces.tables)


def drop(pieces: list[Piece], seq: int) -> None:
    pieces[seq] = replace(pieces[seq], copies=pieces[seq].copies[1:])


def repeat(pieces: list[Piece], seq: int) -> None:
    pieces.append(pieces[seq])


def shift(pieces: list[Piece], seq: int) -> None:
    first, *rest = pieces[seq].copies
    pieces[seq] = replace(pieces[seq], copies=(replace(first, source_offset=first.source_offset + 1), *rest))


@pytest.mark.parametrize(("fault", "senders_see_it"), [(drop, False), (repeat, False), (shift, True)])
def test_the_proof_of_a_rank_fires_for_its_own_pieces_only(fault: Callable, senders_see_it: bool) -> None:
    """The ranks that receive prove together what is proved of a whole plan."""
    plant = world()
    plan = build(plant)
    for seq in (0, 7, len(plan.pieces) - 1):
        piece, broken = plan.pieces[seq], table(plan, fault, seq)
        with pytest.raises(CoverageError):
            prove(broken)
        with pytest.raises(CoverageError, match=piece.copies[0].tensor):
            prove(broken, ("engine", piece.target))
        prove(broken, ("engine", 1 - piece.target))
        prove(broken, ("trainer", (piece.source + 1) % 4))
        if senders_see_it:
            with pytest.raises(CoverageError, match=piece.copies[0].tensor):
                prove(broken, ("trainer", piece.source))


def test_listed_shards_and_columns_are_one_layout() -> None:
    plant = world()
    for layout in (*plant.trainer, *plant.engine):
        listed = replace(layout, shards=tuple(layout.shards))
        assert isinstance(layout.shards, ShardColumns) and listed == layout
        assert encode_layout(listed) == encode_layout(layout)
        assert layout.shards[1:-1] == listed.shards[1:-1] and layout.shards[-1] == listed.shards[-1]
        assert layout.shards != listed.shards[:-1]
    listed_world = [
        [replace(each, shards=tuple(each.shards)) for each in side] for side in (plant.trainer, plant.engine)
    ]
    assert build(plant, trainer=listed_world[0], engine=listed_world[1]) == build(plant)


@pytest.mark.parametrize(("column", "what"), [(0, "tensor"), (1, "box"), (2, "buffer"), (4, "strides")])
@pytest.mark.parametrize("number", [-1, 1 << 40])
def test_numbers_that_stand_for_nothing_are_refused(column: int, what: str, number: int) -> None:
    layout = world().engine[0]
    raw, size = encode_layout(layout), len(layout.shards)
    held = layout.shards
    assert isinstance(held, ShardColumns)
    columns = held.tensor, held.box, held.buffer, held.offset, held.strides
    rows = b"".join(each.astype("<i8").tobytes() for each in columns)
    at = raw.index(rows) + (column * size + 3) * 8
    broken = raw[:at] + number.to_bytes(8, "little", signed=True) + raw[at + 8 :]
    with pytest.raises(ValueError, match=f"layout of engine rank 0: number 3 has {what} {number} of"):
        decode_layout(broken)


def test_a_manifest_makes_no_piece_of_other_ranks() -> None:
    """Rank 0 knows what each rank must have sent from columns; at this size 200,000 copies are not made for it."""
    plan = build(world(), ("trainer", 0))
    assert isinstance(plan.pieces, PieceTable)
    book = TrainerBook("a", "e", 4, 2)
    for rank in range(4):
        seqs = plan.pieces.source == rank
        book.take(
            Emitted(
                attachment="a",
                incarnation=1,
                rank=rank,
                version=1,
                attempt=0,
                pieces=int(seqs.sum()),
                elements=int(plan.pieces.num_elements[seqs].sum()),
                payload_bytes=int(plan.pieces.num_bytes[seqs].sum()) + (4 if rank == 3 else 0),
                wire_bytes=0,
                wait_s=0.0,
            )
        )
    with pytest.raises(ProtocolError, match="trainer rank 3 emitted"):
        book.manifest(plan, incarnation=1, version=1, attempt=0, train_step=1)
    assert not plan.pieces._made
