"""The dialect of pushes: the largest messages that either side makes fit its frames. And versions of what is pushed."""

from __future__ import annotations

import pytest

from weightcached.loader.boxes import Box
from weightcached.loader.layout import Placement
from weightcached.loader.planned import TensorHeader
from weightcached.loader.pushed.wanted import Pushable, pages, pushables
from weightcached.protocol.assigned import assigned_version, is_assigned, resident_digest
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.manifest import Row
from weightcached.protocol.push_messages import (
    PIECES_MAX,
    TRAINER_TO_WORKER,
    WORKER_TO_TRAINER,
    Bucket,
    Piece,
    Wanted,
)


def test_a_hundred_thousand_tensors_come_in_pages() -> None:
    shape, box = (1 << 40, 1 << 20), Box((0, 0), (1 << 40, 1 << 20))
    table = [Pushable(f"{number:0>200}", "bfloat16", shape, (), (box, box), ()) for number in range(100_000)]
    names = []
    for page in pages(table):
        heard = decode_frame(WORKER_TO_TRAINER, encode_frame(WORKER_TO_TRAINER, page))
        assert isinstance(heard, Wanted)
        names += [one.name for one in heard.tensors]
        assert heard.last == (len(names) == len(table))
    assert names == [one.name for one in table]


def test_a_full_bucket_fits_a_frame() -> None:
    piece = Piece(tensor=1 << 40, start=(1 << 40,) * 4, shape=(1 << 40,) * 4, offset=1 << 40, xxh3="f" * 32)
    encode_frame(TRAINER_TO_WORKER, Bucket(number=62, pieces=(piece,) * PIECES_MAX))
    with pytest.raises(ValueError, match="at most"):
        Bucket(number=0, pieces=(piece,) * (PIECES_MAX + 1))


def test_names_that_are_not_needed_are_known() -> None:
    header = TensorHeader("rotary", "float32", (4,), "f", 0, 16)
    (one,) = pushables(Placement((), (0,)), {"rotary": header})
    assert (one.name, one.boxes) == ("rotary", ())


def row(name: str, digest: bytes) -> Row:
    return Row(name, 0, 0, 4, (2,), (1,), "bfloat16", digest)


def test_a_version_is_of_what_is_resident_at_every_rank_and_of_what_was_before() -> None:
    one = resident_digest([row("a", b"1" * 16), row("b", b"2" * 16)])
    assert one == resident_digest([row("b", b"2" * 16), row("a", b"1" * 16)])
    assert one != resident_digest([row("a", b"2" * 16), row("b", b"1" * 16)])
    version = assigned_version("before", {"tp0": one, "tp1": one})
    assert is_assigned(version)
    assert version == assigned_version("before", {"tp1": one, "tp0": one})
    others = [
        ("earlier", {"tp0": one, "tp1": one}),
        ("before", {"tp0": one, "tp1": "0" * 64}),
        ("before", {"tp0": one}),
    ]
    assert version not in [assigned_version(*other) for other in others]
