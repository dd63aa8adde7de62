"""The ``fused`` layout: parameters under engines' names, cut for one rank by the tables in `architectures/`.

Pure. A table says what is wanted; here it meets the headers: names are accounted for, shapes checked against
``config.json``, dtypes settled. Called by `plan.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from weightcached.loader.accounting import Accounting, account
from weightcached.loader.architectures import ARCHITECTURES, WITHOUT_A_TABLE
from weightcached.loader.architectures.ranks import Indivisible, Rank, TooMany
from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.architectures.shape import ModelShape
from weightcached.loader.architectures.table import Architecture
from weightcached.loader.planned import Cast, Copy, PlannedParameter, Quantize, TensorHeader
from weightcached.loader.quantizers import quantizer
from weightcached.loader.schemes import beside, method_of, quantized
from weightcached.loader.schemes.linear import Method, Quantized
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import MissingTensor, ShapeMismatch, UnsupportedModel

LAYERS_BELIEVED = 10_000
"""More layers than this are believed only where there are as many tensors."""

OTHER_EXPERTS = "an expert of another expert-parallel rank"
OTHER_STAGE = "of another pipeline stage"


def fused_parameters(
    tensors: Mapping[str, TensorHeader], config: CacheConfig
) -> tuple[tuple[PlannedParameter, ...], Accounting]:
    """This rank's parameters in the layout's order, and the balanced account of the checkpoint's names.

    Raises UnsupportedModel, ModelConfigError, MissingTensor, UnexpectedTensor or ShapeMismatch.
    """
    architecture = _architecture(config).spelled_in(tensors.keys())
    model = architecture.shape_of(config.model)
    _require_possible_depth(architecture, model, tensors)
    rank = Rank.of(config.parallel)
    if rank.expert_ranks > 1 and "experts" not in architecture.sizes:
        raise UnsupportedModel(
            f"{config.architecture} has no experts to share",
            expected="ep size 1",
            found=f"ep size {rank.expert_ranks}",
            next_step="leave out the options of expert parallelism",
        )
    wanted = _wanted(architecture, model, rank, config)
    method = _method(config)
    made = Quantized(tuple(wanted)) if method is None else quantized(wanted, method, tensors.keys())
    accounting = _account(architecture, model, rank, made, tensors, is_quantized=method is not None)
    parameters: dict[str, PlannedParameter] = {}
    for one in made.parameters:
        _plan_one(one, tensors, config, parameters)
    return tuple(parameters.values()), accounting


def _architecture(config: CacheConfig) -> Architecture:
    table = ARCHITECTURES.get(config.architecture)
    if table is None:
        raise UnsupportedModel(
            f"layout 'fused' has no table for architecture {config.architecture}",
            expected=", ".join(sorted(ARCHITECTURES)),
            found=config.architecture,
            next_step=f"--layout hf serves any architecture as it is on disk, at TP size 1, {WITHOUT_A_TABLE}",
        )
    return table


def _require_possible_depth(architecture: Architecture, model: ModelShape, tensors: Mapping[str, TensorHeader]) -> None:
    """Refuse an absurd number of layers before a list is made of them; a wrong one is found by name, later."""
    for block in architecture.blocks():
        if model.size(block.count) > max(len(tensors), LAYERS_BELIEVED):
            raise MissingTensor(
                f"config.json says {model.size(block.count)} layers, the files have {len(tensors)} tensors in all",
                next_step="see that config.json and the weights belong to one model",
            )


def _wanted(architecture: Architecture, model: ModelShape, rank: Rank, config: CacheConfig) -> list[Wanted]:
    try:
        return list(architecture.wanted(model, rank))
    except Indivisible as fault:
        sizes = ", ".join(map(str, architecture.possible_sizes(model, rank)))
        raise UnsupportedModel(
            f"{config.architecture}: {rank.size} ranks cannot share {fault.what} evenly",
            expected=f"TP size {sizes}",
            found=f"TP size {rank.size}",
            next_step=f"use one of the TP sizes {sizes}",
        ) from None
    except TooMany as fault:
        raise UnsupportedModel(
            f"{config.architecture}: there are more {fault.kind} ranks than {fault.what} to share",
            expected=f"{fault.kind} size 1 to {fault.most}",
            found=f"{fault.kind} size {getattr(config.parallel, f'{fault.kind}_size')}",
            next_step=f"use at most {fault.most} {fault.kind} ranks",
        ) from None


def _method(config: CacheConfig) -> Method | None:
    """The checkpoint's own quantization, which is the only one then."""
    method = method_of(config.model)
    if method is not None and config.quantization.method != "none":
        raise UnsupportedModel(
            "the checkpoint is quantized already",
            expected="--quantization none",
            found=f"--quantization {config.quantization.method}, and quantization_config in config.json",
            next_step="start without --quantization, or name the unquantized checkpoint",
        )
    return method


def _account(
    architecture: Architecture,
    model: ModelShape,
    rank: Rank,
    made: Quantized,
    tensors: Mapping[str, TensorHeader],
    *,
    is_quantized: bool,
) -> Accounting:
    expected = {part.source for one in made.parameters for part in one.parts}
    ignored = {name: OTHER_EXPERTS for one in made.parameters for name in one.elsewhere}
    ignored |= dict.fromkeys(architecture.other_stages(model, rank), OTHER_STAGE)
    if is_quantized:
        ignored |= beside(ignored, tensors.keys() - expected)
    ignored |= made.excuses
    ignored |= architecture.excuses(tensors.keys() - expected - ignored.keys(), model)
    accounting = account(expected=expected, present=tensors, ignored=ignored)
    if not accounting.balanced:
        accounting.require_balance(where=_files(accounting, tensors), hint=_layer_hint(architecture, model, tensors))
    return accounting


def _files(accounting: Accounting, tensors: Mapping[str, TensorHeader]) -> str | None:
    """The files that hold what nobody expected."""
    files = sorted({tensors[name].file for name in accounting.unexpected})
    return ", ".join(files) or None


def _layer_hint(architecture: Architecture, model: ModelShape, tensors: Mapping[str, TensorHeader]) -> str | None:
    """What to look at when the files have another number of layers than ``config.json`` says."""
    for block in architecture.blocks():
        prefix = architecture.on_disk(f"{block.prefix}.")
        components = (name[len(prefix) :].split(".", 1)[0] for name in tensors if name.startswith(prefix))
        indices = (int(text) for text in components if text.isdecimal() and len(text) < 10)
        stated, there = model.size(block.count), max(indices, default=-1) + 1
        if stated != there:
            return f"config.json says {stated} layers, the files have {there}: one of them is of another model"
    return None


def _plan_one(
    wanted: Wanted,
    tensors: Mapping[str, TensorHeader],
    config: CacheConfig,
    parameters: dict[str, PlannedParameter],
) -> None:
    """Add the parameter to ``parameters``, or what quantization makes of it."""
    name, shape, part_kind = wanted.name, wanted.shape, wanted.part_kind
    if wanted.alias_of is not None:
        dtype = parameters[wanted.alias_of].dtype
        parameters[name] = PlannedParameter(name, shape, dtype, None, (), alias_of=wanted.alias_of, part_kind=part_kind)
        return
    headers = [_header(part, tensors) for part in wanted.parts]
    source = _common_dtype(wanted, headers)
    copies = tuple(
        [
            Copy(header, part.box, part.destination, part.transposed)
            for header, part in zip(headers, wanted.parts, strict=True)
            if 0 not in part.box.shape
        ]
    )
    dtype = wanted.dtype or (source if config.dtype == "auto" else config.dtype)
    if wanted.linear and config.quantization.method != "none":
        quantize = quantizer(name, shape, config.quantization, dtype=dtype)
        for planned in _quantized(wanted, source, copies, quantize):
            parameters[planned.name] = planned
        return
    cast = Cast(dtype, wanted.finite) if copies and (dtype != source or wanted.finite) else None
    parameters[name] = PlannedParameter(
        name, shape, dtype, source if copies else None, copies, wanted.zeros, cast, part_kind=part_kind
    )


def _quantized(wanted: Wanted, source: str, copies: tuple[Copy, ...], quantize: Quantize) -> Iterator[PlannedParameter]:
    """What quantization makes of the weight, in its order: the first has the copies."""
    kind, (weight, *others) = wanted.part_kind, quantize.products
    yield PlannedParameter(
        weight.name, weight.shape, weight.dtype, source, copies, wanted.zeros, quantize, part_kind=kind
    )
    for one in others:
        yield PlannedParameter(one.name, one.shape, one.dtype, None, (), produced_by=weight.name, part_kind=kind)


def _header(part: Part, tensors: Mapping[str, TensorHeader]) -> TensorHeader:
    header = tensors[part.source]
    if header.shape == part.shape:
        return header
    if header.shape in part.same_as:
        return replace(header, shape=part.shape)
    raise ShapeMismatch(
        f"{header.name} does not have the shape that config.json implies",
        expected=list(part.shape) if not part.same_as else [list(shape) for shape in (part.shape, *part.same_as)],
        found=list(header.shape),
        where=header.file,
        next_step="see that config.json and the weights belong to one model",
    )


def _common_dtype(wanted: Wanted, headers: list[TensorHeader]) -> str:
    """The dtype of all headers. Raises UnsupportedModel unless it is one, and what the parameter can be made of."""
    dtype = headers[0].dtype
    if any(header.dtype != dtype for header in headers[1:]):
        raise UnsupportedModel(
            f"the parts of {wanted.name} have different dtypes",
            expected="one dtype",
            found="; ".join(f"{header.name}: {header.dtype}" for header in headers),
            where=", ".join(sorted({header.file for header in headers})),
            next_step="use --layout hf at TP size 1, or convert the checkpoint",
        )
    is_plain = wanted.dtype is None or DTYPES[wanted.dtype].castable
    if not (DTYPES[dtype].castable if is_plain else dtype == wanted.dtype):
        if is_plain:
            what = "floating point, as config.json says it is no quantized weight"
            expected: str | None = ", ".join(name for name, row in DTYPES.items() if row.castable)
        else:
            what, expected = "what config.json's quantization_config says", wanted.dtype
        raise UnsupportedModel(
            f"{headers[0].name} is {dtype}, not {what}",
            expected=expected,
            found=dtype,
            where=headers[0].file,
            next_step="see that config.json and the weights belong together, or use --layout hf at TP size 1",
        )
    return dtype
