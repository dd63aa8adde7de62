"""Load plans: from headers, config and rank to the list of copies that makes this rank's parameters.

Owns `make_plan` and the ``hf`` layout; re-exports the plan's words from `planned.py`. Pure: reads headers only, never
a weight, never the clock. Whoever executes a plan may rely on the proof: every element of every parameter is written
exactly once, and every checkpoint tensor is loaded or ignored for a stated reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightcached.loader.accounting import Accounting, account
from weightcached.loader.architectures import ARCHITECTURES, WITHOUT_A_TABLE
from weightcached.loader.boxes import Box, whole
from weightcached.loader.collector import collector_paused
from weightcached.loader.fused import fused_parameters
from weightcached.loader.planned import (
    Cast,
    Copy,
    LoadPlan,
    PartKind,
    PlannedParameter,
    Product,
    Quantize,
    TensorHeader,
)
from weightcached.loader.proof import prove
from weightcached.protocol.canonical import canonical_bytes
from weightcached.protocol.config import LAYOUT_REVISIONS, CacheConfig
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import CheckpointChanged, UnsupportedModel
from weightcached.protocol.text import shown

__all__ = [
    "Accounting",
    "Box",
    "Cast",
    "Copy",
    "LoadPlan",
    "PartKind",
    "PlannedParameter",
    "Product",
    "Quantize",
    "TensorHeader",
    "make_plan",
]


def make_plan(
    checkpoint_tensors: Mapping[str, TensorHeader], model_config: Mapping[str, Any], config: CacheConfig
) -> LoadPlan:
    """The plan for one rank. ``model_config`` is ``config.json`` as it was read beside the headers.

    Sizes are taken from ``config.model``, which the fingerprint covers. Raises CheckpointChanged when ``config.json``
    no longer says the same; UnsupportedModel, ModelConfigError, MissingTensor, UnexpectedTensor or ShapeMismatch when
    no plan can be; PlanError when the plan made is not provably whole.
    """
    _require_same_model(model_config, config)
    _require_supported(config)
    make = _hf_parameters if config.layout == "hf" else fused_parameters
    with collector_paused():
        parameters, accounting = make(checkpoint_tensors, config)
        prove(parameters)
    return LoadPlan(config=config, parameters=parameters, accounting=accounting)


def _require_same_model(model_config: Mapping[str, Any], config: CacheConfig) -> None:
    keyed = config.model_dump()["model"]
    there = {name: model_config[name] for name in keyed if name in model_config}
    if canonical_bytes(there) != canonical_bytes(keyed):
        differing = [name for name in keyed if canonical_bytes(there.get(name)) != canonical_bytes(keyed[name])]
        raise CheckpointChanged(
            "config.json is not the one that the cache's config was made from",
            expected=shown({name: keyed[name] for name in differing}),
            found=shown({name: there.get(name) for name in differing}),
            where="config.json",
            next_step="start again",
        )


def _require_supported(config: CacheConfig) -> None:
    parallel = config.parallel
    if parallel.dp_size != 1:
        raise UnsupportedModel(
            f"dp size {parallel.dp_size} is not supported: data-parallel replicas hold the same",
            expected=1,
            found=parallel.dp_size,
            next_step="let all replicas use one daemon a rank; experts that they share are ep ranks",
        )
    revision = LAYOUT_REVISIONS.get(config.layout)
    if revision != config.layout_revision:
        raise UnsupportedModel(
            f"layout {config.layout!r} at revision {config.layout_revision} is not one this release makes",
            expected=", ".join(f"{name} at {number}" for name, number in LAYOUT_REVISIONS.items()),
            next_step="use the same release of weightcached on both sides",
        )
    sizes = {"TP": parallel.tp_size, "PP": parallel.pp_size, "EP": parallel.ep_size}
    if config.layout == "hf" and any(size != 1 for size in sizes.values()):
        fused = config.architecture in ARCHITECTURES
        raise UnsupportedModel(
            "layout 'hf' keeps parameters as on disk, so it has one rank",
            expected="TP, PP and EP size 1",
            found=", ".join(f"{kind} size {size}" for kind, size in sizes.items() if size != 1),
            next_step="use --layout fused"
            if fused
            else f"use size 1: {config.architecture} has no table for more; {WITHOUT_A_TABLE}",
        )
    if config.layout == "hf" and config.quantization.method != "none":
        raise UnsupportedModel(
            "layout 'hf' keeps parameters as on disk and quantizes nothing",
            expected="--quantization none",
            found=f"--quantization {config.quantization.spelled}",
            next_step="use --layout fused",
        )


def _hf_parameters(
    tensors: Mapping[str, TensorHeader], config: CacheConfig
) -> tuple[tuple[PlannedParameter, ...], Accounting]:
    """Every tensor as it is on disk, sorted by name: file order is an accident of saving, names are not."""
    ordered = [tensors[name] for name in sorted(tensors)]
    accounting = account(expected=tensors, present=tensors, ignored={})
    return tuple(_as_on_disk(header, config.dtype) for header in ordered), accounting


def _as_on_disk(header: TensorHeader, dtype: str) -> PlannedParameter:
    box = whole(header.shape)
    copies = (Copy(header, box, box),) if box.volume else ()
    asked = dtype != "auto" and DTYPES[header.dtype].castable
    stored = dtype if asked else header.dtype
    return PlannedParameter(
        header.name,
        header.shape,
        stored,
        header.dtype if copies else None,
        copies,
        transform=Cast(stored) if copies and stored != header.dtype else None,
    )
