"""Are the resident bytes those that the manifest describes? A process that hashes every parameter where it lies.

``python -P -m weightcached.loader.verify --manifest FD --segment FD …`` is what the keeper runs before it serves what
it adopted, when it was told ``--verify-on-adopt``. It reads a segment at memory speed through read-only mappings, with
a few threads, and answers with one line of JSON: what it looked at, and the names of parameters whose bytes are not
those that were published. It changes nothing and reads no checkpoint. Clients verify what they have mapped themselves
(`weightcached verify`), by the same comparison. With ``--beside`` it also says which parameters are not of the form
that they have in another manifest, that of what is served: an engine made for those could not bind these; and whether
all of them have the very bytes that they have there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from weightcached.protocol.assigned import resident_digest
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import TransferError, WeightCacheError
from weightcached.protocol.integrity import differing_rows
from weightcached.protocol.likeness import form_differences
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.processes import die_with_parent, step_back

NAMES_MAX = 20
"""Of parameters that differ, in an answer; their number is in it too."""


def verify(manifest_fd: int, segment_fds: Sequence[int], *, beside_fd: int | None = None) -> dict[str, Any]:
    """Hash every row's extent, and compare its form with that in the manifest ``beside_fd``, where there is one. Blocks
    for one pass over the segments. The descriptors stay the caller's.

    Raises TransferError when the manifest and the segments do not even fit together.
    """
    started_s = time.monotonic()
    manifest = _read(manifest_fd)
    beside = _read(beside_fd) if beside_fd is not None else None
    formed_otherwise = list(form_differences(beside, manifest)) if beside is not None else []
    nbytes = manifest.meta.segments_nbytes
    if len(nbytes) != len(segment_fds):
        raise TransferError("another number of segments", expected=len(nbytes), found=len(segment_fds))
    kind = kind_of(CacheConfig.model_validate(manifest.meta.config))
    with ExitStack() as held:
        segments = []
        for number, (fd, size) in enumerate(zip(segment_fds, nbytes, strict=True)):
            kind.verify(fd, nbytes=size, what=f"segment {number}")
            segments.append(held.enter_context(kind.map_readonly(fd, nbytes=size)).view())
        differing = differing_rows(manifest, segments)
        segments.clear()  # no view may be left when they are unmapped
    return {
        "rows": sum(row.alias_of is None for row in manifest),
        "nbytes": manifest.content_nbytes,
        "differing": differing[:NAMES_MAX],
        "differing_count": len(differing),
        "formed_otherwise": formed_otherwise[:NAMES_MAX],
        "formed_otherwise_count": len(formed_otherwise),
        "same": beside is not None and resident_digest(beside) == resident_digest(manifest),
        "seconds": round(time.monotonic() - started_s, 6),
    }


def _read(fd: int) -> Manifest:
    return Manifest.decode(os.pread(fd, os.fstat(fd).st_size, 0))


def main(argv: list[str]) -> int:
    """One line of JSON on standard output: what :func:`verify` found, or ``{"error": …}`` with exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m weightcached.loader.verify", description=__doc__)
    parser.add_argument("--manifest", type=int, required=True, metavar="FD")
    parser.add_argument("--beside", type=int, metavar="FD", help="the manifest of what is served")
    parser.add_argument("--segment", type=int, action="append", default=[], metavar="FD")
    parser.add_argument("--die-with-parent", type=int, metavar="PID")
    parser.add_argument("--yield", action="store_true", dest="yields", help="let everybody else compute first")
    given = parser.parse_args(argv)
    if given.die_with_parent is not None:
        die_with_parent(given.die_with_parent)
    if given.yields and (refused := step_back()):
        print(f"could not step back behind everybody else: {'; '.join(refused)}", file=sys.stderr)
    try:
        answer = verify(given.manifest, given.segment, beside_fd=given.beside)
    except WeightCacheError as error:
        print(json.dumps({"error": error.as_fields()}), flush=True)
        return 1
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
