"""Publishing: a trainer pushes weights to the daemons of a group, and all of their ranks change over, or none does.

    from weightcached.client.publish import publish, stage

    version = publish(model.state_dict(), name="policy")          # a checkpoint's names; blocks
    publish({"lm_head.weight": head}, name="policy", partial=True)   # the rest stays as it is

    with stage(name="policy") as publication:                     # for whoever holds slices only
        for name in publication.names:
            for boxes in publication.boxes(name).values(): …
            publication.push(name, box, part)
        version = publication.commit()

The daemon's own plan shards, fuses and quantizes what is pushed, as it would have from files. What each means, and what
an RL loop looks like, is in `README.md` here. Nothing is imported here before it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcached.client.publish.session import Publication
    from weightcached.client.publish.values import Value

__all__ = ["publish", "stage"]


def publish(
    tensors: Mapping[str, Value] | Iterable[tuple[str, Value]],
    *,
    partial: bool = False,
    trainer: str | None = None,
    keep: int | None = None,
    wait: bool = False,
    force: bool = False,
    bucket_nbytes: int | None = None,
    bucket_count: int | None = None,
    **where: Any,
) -> str:
    """Push ``tensors`` (checkpoint name → tensor, array, or what gives one for a box) and commit. Blocks; returns the
    version that every rank serves then. Raises why nothing has changed. Parameters are :func:`stage`'s.
    """
    from weightcached.client.publish.values import named

    pairs = named(tensors)
    with stage(
        partial=partial,
        trainer=trainer,
        keep=keep,
        wait=wait,
        force=force,
        bucket_nbytes=bucket_nbytes,
        bucket_count=bucket_count,
        **where,
    ) as publication:
        for name, value in pairs:
            publication.push(name, value)
        return publication.commit()


def stage(
    *,
    partial: bool = False,
    trainer: str | None = None,
    keep: int | None = None,
    wait: bool = False,
    force: bool = False,
    bucket_nbytes: int | None = None,
    bucket_count: int | None = None,
    **where: Any,
) -> Publication:
    """A push that is made piece by piece, in a ``with`` block that ends in ``commit()``. Left without, nothing changes.

    ``partial``: what is not pushed stays as it is served now. ``trainer``: who is said to have pushed. ``keep``: how
    many earlier generations stay for rollback. ``wait`` for ranks that still load or do not answer yet and for another
    change that is under way, or give up one that is open by ``force``. ``bucket_nbytes`` (a multiple of 4096, by
    default 16 MiB) and ``bucket_count`` (3): the memory that every rank is pushed through. ``where``: ``runtime_dir``,
    ``name``, ``timeout_s`` (for all of it) and ``allowed``, as for ``weightcached.client.control.update``.
    InvalidOption for what is none of these.

    Entering raises DaemonAbsent, DaemonUnreachable and RanksDisagree about the group, UpdateConflict while another
    change is under way, InsufficientMemory, UnsupportedModel for a layout that an engine makes, and UntrustedClient for
    users other than root and the daemon's own.
    """
    from weightcached.client.control.group import Where
    from weightcached.client.publish import session

    return session.Publication(
        Where.of(**where),
        trainer=trainer or session.default_trainer(),
        partial=partial,
        keep=keep,
        wait=wait,
        force=force,
        bucket_nbytes=bucket_nbytes,
        bucket_count=bucket_count,
    )
