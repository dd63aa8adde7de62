"""Are a daemon's resident weights what they should be? Compares one rank, and says it name by name.

Owns two comparisons: with the manifest's digests (:func:`against_manifest`), and with what the naive reference makes of
a checkpoint on disk (:func:`against_disk`). Prints nothing; ``verify_command.py`` does. torch and the reference are
imported only for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightcached.client.weights import WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.manifest import Geometry
from weightcached.protocol.memory.kinds import SegmentBytes

if TYPE_CHECKING:
    import torch

    from weightcached.loader.reference import Reference

Verdict = Literal["equal", "differs", "missing", "extra", "not compared"]
"""``missing``: a parameter that the rank should have, since files have tensors for it, but that is not resident.
``extra``: a resident parameter for which the files have no tensor."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said of one name. ``why`` is empty where it is equal."""

    name: str
    verdict: Verdict
    why: str = ""


def against_manifest(weights: WeightSet) -> list[Finding]:
    """Every parameter's resident bytes against its digest in the manifest. Blocks for one pass over the memory."""
    differing = set(weights.differing())
    return [
        Finding(row.name, "differs", f"its bytes are not those of digest {row.digest.hex()}")
        if row.name in differing
        else Finding(row.name, "equal")
        for row in weights.manifest
        if row.alias_of is None
    ]


def against_disk(weights: WeightSet, model_dir: Path, config: CacheConfig) -> list[Finding]:
    """Every parameter against the naive reference's, and what the reference has besides. Blocks for reading the
    checkpoint, more than once where parameters share tensors. Raises CheckpointError when it cannot be read.
    """
    from weightcached.loader.reference import Reference

    with Reference(model_dir, config) as reference:
        segments = weights.readable()
        findings = [_compared(name, weights, segments, reference) for name in weights]
        for name, tensor in reference.missing(weights):
            findings.append(Finding(name, "missing", f"it is not resident, though files have {tensor}"))
        return findings


def _compared(name: str, weights: WeightSet, segments: Sequence[SegmentBytes], reference: Reference) -> Finding:
    from weightcached.loader.reference import NotCompared, NotOnDisk, Unfit

    try:
        expected = reference.parameter(name)
    except NotCompared as reason:
        return Finding(name, "not compared", str(reason))
    except NotOnDisk as what:
        return Finding(name, "extra", f"no file has {what}")
    except Unfit as why_not:
        return Finding(name, "differs", f"what the files have makes no such parameter: {why_not}")
    why = _difference(expected, _on_host(weights.manifest.geometry(name), segments))
    return Finding(name, "equal") if why is None else Finding(name, "differs", why)


def _on_host(geometry: Geometry, segments: Sequence[SegmentBytes]) -> torch.Tensor:
    """The parameter as a host's tensor, by way of no other: what is on a GPU can be read without a torch for it."""
    import torch

    dtype = getattr(torch, geometry.dtype)
    if not geometry.nbytes:
        return torch.empty(geometry.shape, dtype=dtype)
    data = segments[geometry.segment][geometry.offset : geometry.offset + geometry.nbytes]
    return torch.frombuffer(data, dtype=dtype).as_strided(geometry.shape, geometry.stride)


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    """In which bytes the two differ, in words; NaN is as good as its bits."""
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    theirs, ours = (_elements(tensor) for tensor in (expected, found))
    differing = (theirs != ours).any(dim=1).nonzero().flatten()
    if not len(differing):
        return None
    first = int(differing[0])
    values = (tensor.flatten()[first].item() for tensor in (found, expected))
    return f"{len(differing)} of {len(ours)} elements, the first is {first}: {' instead of '.join(map(str, values))}"


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, one row for each element."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size())
