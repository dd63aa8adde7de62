"""In what two manifests differ, in words: by what an engine binds, and by what it also maps.

Owns which columns count for which. Whoever asks owns the refusal. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from weightcached.protocol.config import explain_differences
from weightcached.protocol.manifest import Manifest, Row

_FORM = ("dtype", "shape", "stride", "kind", "persistent", "alias_of")
_PLACE = ("segment", "offset")


def form_differences(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """What an engine that was made for the one could not bind of the other: names, and each parameter's form. Raises
    TransferError for a row that lies.
    """
    yield from _row_differences(ours, theirs, _FORM)


def layout_differences(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """What keeps the one from taking the other's place under tensors that stay what they are: the form, the places,
    the config and the scalars. Raises TransferError for a row that lies.
    """
    if ours.meta.fingerprint != theirs.meta.fingerprint:
        for field in explain_differences(theirs.meta.config, ours.meta.config):
            yield f"config {field.field}: {field.client!r} here, {field.daemon!r} there"
    if ours.meta.segments_nbytes != theirs.meta.segments_nbytes:
        yield f"segments of {ours.meta.segments_nbytes} bytes here, {theirs.meta.segments_nbytes} there"
    ours_only, theirs_only = ours.meta.scalars, theirs.meta.scalars
    for name in sorted(ours_only.keys() | theirs_only.keys()):
        if name not in ours_only or name not in theirs_only or ours_only[name] != theirs_only[name]:
            yield f"scalar {name}: {ours_only.get(name, 'none')!r} here, {theirs_only.get(name, 'none')!r} there"
    yield from _row_differences(ours, theirs, (*_FORM, *_PLACE))


def _row_differences(ours: Manifest, theirs: Manifest, columns: tuple[str, ...]) -> Iterator[str]:
    for row in ours:
        if row.name not in theirs:
            yield f"{row.name}: not there"
        elif difference := _difference(row, theirs.row(row.name), columns):
            yield f"{row.name}: {difference}"
    for name in theirs.names:
        if name not in ours:
            yield f"{name}: not here"


def _difference(ours: Row, theirs: Row, columns: tuple[str, ...]) -> str:
    pairs = ((what, getattr(ours, what), getattr(theirs, what)) for what in columns)
    return ", ".join(f"{what} {here} here, {there} there" for what, here, there in pairs if here != there)
