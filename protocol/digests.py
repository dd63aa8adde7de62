"""Owns the content digest of a checkpoint, and the command that prints it.

The digest (hashing.py) costs one pass over the bytes, so it is computed once per host and remembered under the receipts
of the files (digest_cache.py); a sidecar can state it too (sidecar.py).

``python -m weightcached.protocol.digests`` is what ``weightcached digest`` runs and what the keeper starts, at low
priority, after publishing. A client calls :func:`digest_of`, or runs the command where it wants a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from weightcached.protocol.command_line import USAGE_EXIT, Parser
from weightcached.protocol.content import (
    OpenWeights,
    Receipts,
    open_weights,
    take_receipts,
    weight_files,
    weights_visible,
)
from weightcached.protocol.digest_cache import HEX, DigestCache, Shelf, cache_directory
from weightcached.protocol.errors import CheckpointChanged, CheckpointError, InvalidOption, WeightCacheError
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.hashing import Progress, content_digest
from weightcached.protocol.hub import resolve
from weightcached.protocol.processes import die_with_parent, lower_priority
from weightcached.protocol.sidecar import SIDECAR_NAME, Sidecar, read_sidecar, write_sidecar


@dataclass(frozen=True)
class Digest:
    """What is known about a checkpoint's content, and how."""

    hex: str
    receipts: Receipts | None
    """The receipts under which it holds; ``None`` where the weights cannot be seen."""
    source: Literal["cache", "computed", "sidecar"]
    seconds: float
    nbytes: int
    """Bytes of the files it stands for (read only when ``source`` is ``computed``)."""
    settled: bool
    """Whether equal receipts prove this digest from now on: trusted, and not young when reading began."""
    remembered: bool
    """Whether the next one who asks about the same receipts need not compute."""
    warnings: tuple[str, ...]


def digest_of(
    model_dir: str | os.PathLike[str],
    cache: DigestCache,
    *,
    also_trusted: Collection[str] = (),
    expect_receipts: str | None = None,
    progress: Progress | None = None,
) -> Digest:
    """The digest of ``model_dir``'s content: remembered, else from a sidecar that counts, else computed and remembered.

    Blocks for one pass over the bytes, or while another process on this host makes that pass (without bound: run the
    command in a process of its own where there is a deadline). ``expect_receipts`` (hex) ties the result to files seen
    earlier. Raises :class:`CheckpointChanged` when files differ from those or change meanwhile,
    :class:`CheckpointError` and its kin for bad files, :class:`InvalidOption` for a cache that others can write.
    """
    started = time.monotonic()
    if not weights_visible(model_dir) and (stated := read_sidecar(model_dir)) is not None:
        return Digest(stated.digest, None, "sidecar", time.monotonic() - started, stated.nbytes, False, True, ())
    warnings: list[str] = []
    with open_weights(weight_files(model_dir)) as weights, cache.opened(warnings) as shelf:

        def look() -> Receipts:
            receipts = take_receipts(weights, also_trusted=also_trusted)
            if expect_receipts not in (None, receipts.sha256):
                raise CheckpointChanged(
                    "the checkpoint is not the one that was asked about",
                    expected=f"receipts {expect_receipts}",
                    found=f"receipts {receipts.sha256}",
                    where=model_dir,
                )
            return receipts

        receipts = look()
        answer = _known(weights, receipts, shelf, warnings)
        if answer is None and receipts.trusted:
            with shelf.turn(receipts.sha256) as own:  # whoever was first has remembered it by now
                answer = _recalled(receipts, shelf) or _computed(weights, receipts, look, own, warnings, progress)
        elif answer is None:
            answer = _computed(weights, receipts, look, shelf, warnings, progress)
    return Digest(
        answer.hex,
        receipts,
        answer.source,
        time.monotonic() - started,
        receipts.nbytes,
        answer.settled,
        answer.remembered,
        tuple(dict.fromkeys(warnings)),
    )


@dataclass(frozen=True)
class _Answer:
    hex: str
    source: Literal["cache", "computed", "sidecar"]
    settled: bool = True
    remembered: bool = True


def _recalled(receipts: Receipts, shelf: Shelf) -> _Answer | None:
    remembered = shelf.recall(receipts.sha256)
    return None if remembered is None else _Answer(remembered, "cache")


def _known(weights: OpenWeights, receipts: Receipts, shelf: Shelf, warnings: list[str]) -> _Answer | None:
    """What the cache, or else a sidecar, says under exactly these receipts; nothing where receipts prove nothing."""
    if not receipts.trusted:
        return None
    if (answer := _recalled(receipts, shelf)) is not None:
        return answer
    try:
        sidecar = read_sidecar(weights.files.directory, ours_only=True)
    except CheckpointError as error:
        warnings.append(str(error))
        return None
    if sidecar is None or sidecar.receipts != receipts.sha256:
        return None
    return _Answer(sidecar.digest, "sidecar")


def _computed(
    weights: OpenWeights,
    asked: Receipts,
    look: Callable[[], Receipts],
    shelf: Shelf,
    warnings: list[str],
    progress: Progress | None,
) -> _Answer:
    """One pass over the bytes between two looks, both equal to ``asked``; remembered if any edit must have shown.

    Age counts from the look *before* the pass: an edit within one tick of the last one leaves the same ctime, so only
    files that had already settled when reading began are known to have been still.
    """
    before = look()
    digest = content_digest(weights, progress=progress)
    for receipts in (before, look()):
        asked.require_same(receipts)
    if not before.trusted:
        warnings.append(f"the digest is not remembered: {before.rule}")
    elif before.is_young():
        warnings.append("the digest is not remembered: the files were written less than two seconds before")
    else:
        return _Answer(digest, "computed", remembered=shelf.remember(before.sha256, digest))
    return _Answer(digest, "computed", settled=False, remembered=False)


def main(argv: list[str]) -> int:
    """``weightcached digest MODEL``: prints the digest, as text or as one line of JSON.

    Exit codes: 0 printed · 1 the checkpoint cannot be read · 3 the checkpoint changed meanwhile, or is not the one
    ``--expect-receipts`` names · 64 an option or the cache directory cannot be used. With ``--json`` an error is one
    line too, ``{"error": {"code": …, "message": …, …}}``.
    """
    options = _parser().parse_args(argv)
    if options.die_with_parent is not None:
        die_with_parent(options.die_with_parent)
    notes = lower_priority() if options.low_priority else ()
    try:
        document = _run(options, notes)
    except WeightCacheError as error:
        if options.json:
            print(json.dumps({"error": error.as_fields()}), flush=True)
        else:
            print(f"weightcached digest: {error}", file=sys.stderr)
        return 3 if isinstance(error, CheckpointChanged) else USAGE_EXIT if isinstance(error, InvalidOption) else 1
    if options.json:
        print(json.dumps(document), flush=True)
    else:
        print(f"{document['digest']}  {document['path']}", flush=True)
        for warning in document["warnings"]:
            print(f"weightcached digest: {warning}", file=sys.stderr)
    return 0


def _run(options: argparse.Namespace, notes: tuple[str, ...]) -> dict[str, Any]:
    also_trusted = frozenset(map(checked_name, options.trust_filesystem))
    model_dir = resolve(options.model)
    meter = _Meter() if sys.stderr.isatty() else None
    digest = digest_of(
        model_dir,
        DigestCache(cache_directory(options.cache_dir)),
        also_trusted=also_trusted,
        expect_receipts=options.expect_receipts,
        progress=meter,
    )
    if meter is not None:
        meter.done()
    receipts = digest.receipts
    sidecar = None
    if options.write_sidecar:
        if receipts is None:
            raise CheckpointError("there are no weights to write a sidecar for", where=model_dir)
        proof = receipts.sha256 if digest.settled else None
        sidecar = write_sidecar(model_dir, Sidecar(digest.hex, proof, digest.nbytes))
    return {
        "digest": digest.hex,
        "path": str(model_dir),
        "receipts": receipts and receipts.sha256,
        "settled": digest.settled,
        "rule": receipts and receipts.rule,
        "source": digest.source,
        "seconds": round(digest.seconds, 6),
        "nbytes": digest.nbytes,
        "remembered": digest.remembered,
        "sidecar": sidecar and str(sidecar),
        "warnings": [*notes, *digest.warnings],
    }


class _Meter:
    """A line on the terminal that is written over as bytes are hashed, ten times a second at most."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._shown >= 0.1:
            self._shown = now
            rate = done / (now - self._started)
            print(f"\rdigest: {done / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s ", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Leaves the line standing, if there is one."""
        if self._shown != self._started:
            print(file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached digest",
        description="Print the digest of a checkpoint's content, which is computed once per host. It is no version:\n"
        "those are of content and configuration together (`weightcached generations`).",
        epilog="exit codes: 0 printed; 1 the checkpoint cannot be read; 3 the checkpoint changed meanwhile, or has\n"
        "other receipts than expected; 64 an option or the cache directory cannot be used",
    )
    parser.add_argument("model", metavar="DIR|ID", help="a checkpoint directory, or a hub id")
    parser.add_argument("--json", action="store_true", help="one line of JSON, also for errors")
    parser.add_argument("--write-sidecar", action="store_true", help=f"also write {SIDECAR_NAME} beside the weights")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where digests are remembered (default: $WEIGHTCACHED_CACHE_DIR, else /var/cache/weightcached for root, "
        "and the folder weightcached of $XDG_CACHE_HOME or ~/.cache for others)",
    )
    parser.add_argument("--low-priority", action="store_true", help="let every other process go first")
    parser.add_argument(
        "--expect-receipts", metavar="SHA256", type=_hex, help="fail unless the files are exactly these"
    )
    parser.add_argument(
        "--trust-filesystem",
        metavar="TYPE",
        action="append",
        default=[],
        help="believe inode and ctime there too (repeatable)",
    )
    parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)  # for a daemon or an engine
    return parser


def _hex(text: str) -> str:
    if not HEX.fullmatch(text):
        raise argparse.ArgumentTypeError("64 hex digits are expected")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
