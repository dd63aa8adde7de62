"""What a trainer and the worker that it pushes to say to each other, over a socket pair that the keeper has made.

The weights themselves go through *buckets*: memory that both map, which the trainer writes and the worker reads. The
worker says what is ``Wanted``, page by page; then the trainer sends a ``Bucket`` as often as it has filled one, and may
write to it again only when the worker has said that it is ``Free``. After ``Finish`` the worker answers ``Filled`` with
a digest of all that is resident now and takes the version that the trainer makes of every rank's (``assigned.py``);
when the change is prepared is the control plane's to say. Where something is wrong the socket just ends: why, is said
on the trainer's connection to the keeper. Same framing as the data plane.

Nobody's word is taken for a box: a piece says which tensor and which box of it lies where in the bucket, its size
follows from that, and its XXH3-128 has to be that of the bytes that the worker reads.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weightcached.protocol.messages import Count, Dialect, Hex32, Hex64, LongText, Message, ShortText

DIMENSIONS_MAX = 64
PIECES_MAX = 2048
"""In one bucket."""
PAGE_TENSORS_MAX = 1024
PIECE_ALIGNMENT_BYTES = 64
"""Every piece begins at a multiple of it in its bucket."""
_BODY_MAX_BYTES = 1024 * 1024

Extents = Annotated[tuple[Count, ...], Field(strict=False, max_length=DIMENSIONS_MAX)]


class PushedBox(Message):
    """Elements ``start[i] <= index[i] < start[i] + shape[i]`` of a tensor."""

    start: Extents
    shape: Extents


class WantedTensor(Message):
    """One tensor that may be pushed: of a checkpoint's name. Its number is its place in all pages together.

    ``boxes`` are what this rank needs of it, disjoint: each is to be pushed whole, in as many pieces as the trainer
    likes. None where it needs nothing: then nothing of it is sent.
    """

    name: LongText
    dtype: ShortText
    shape: Extents
    same_as: Annotated[tuple[Extents, ...], Field(strict=False, max_length=16)] = ()
    """Other shapes that it may come in, of equal elements in equal order."""
    boxes: Annotated[tuple[PushedBox, ...], Field(strict=False, max_length=4096)]


class Wanted(Message):
    """A page of what may be pushed. ``last`` of them: now buckets are taken."""

    tensors: Annotated[tuple[WantedTensor, ...], Field(strict=False, max_length=PAGE_TENSORS_MAX)]
    last: bool


class Piece(Message):
    """A box of tensor ``tensor`` lies in the bucket from byte ``offset``, in C order. ``xxh3`` is of its bytes."""

    tensor: Count
    start: Extents
    shape: Extents
    offset: Count
    xxh3: Hex32


class Bucket(Message):
    """Bucket ``number`` holds these pieces. The trainer keeps its hands off it until it is ``Free``."""

    number: Count
    pieces: Annotated[tuple[Piece, ...], Field(strict=False, max_length=PIECES_MAX)]


class Free(Message):
    """Everything in the bucket has been taken."""

    number: Count


class Finish(Message):
    """That was all: so many pieces in all buckets. Answered with ``Filled``."""

    pieces: Count


class Filled(Message):
    """Every parameter is whole. ``resident`` is the SHA-256 over every row's name, form and digest."""

    resident: Hex64
    pushed_nbytes: Count
    kept_nbytes: Count
    """Resident bytes that were taken from the generation before."""
    unchanged: bool
    """All of them are what that generation has, whatever was pushed."""


class Assign(Message):
    """The version, equal on all ranks. It goes into the manifest. Where every rank has said ``unchanged`` each is
    assigned that of the generation before: then nothing is made, and what is served is what was pushed.
    """

    version: ShortText


TRAINER_TO_WORKER = Dialect(
    "trainer to worker",
    {1: Bucket, 2: Finish, 3: Assign},
    body_max_bytes=_BODY_MAX_BYTES,
    fds_max=0,
    items_max=256 * 1024,
    list_max=PIECES_MAX,
)
WORKER_TO_TRAINER = Dialect(
    "worker to trainer",
    {64: Wanted, 65: Free, 66: Filled},
    body_max_bytes=_BODY_MAX_BYTES,
    fds_max=0,
    items_max=256 * 1024,
    list_max=4096,
)
