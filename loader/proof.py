"""The coverage proof: every plan is shown to write each element of each parameter exactly once before anything is read.

Pure, and run on every plan. It trusts no layout rule: a rule that leaves a gap, writes twice, reads outside a tensor or
mixes dtypes ends here as a PlanError, which is a bug of this project, not of the checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from weightcached.loader.boxes import Box, Shape, coverage_fault, is_inside
from weightcached.loader.planned import Copy, PlannedParameter, Product, Quantize
from weightcached.protocol.errors import PlanError


def prove(parameters: Sequence[PlannedParameter]) -> None:
    """Raise PlanError unless the parameters are each written exactly once, from bytes that exist, by one writer."""
    by_name = {parameter.name: parameter for parameter in parameters}
    if len(by_name) != len(parameters):
        raise PlanError("two parameters of the plan have one name")
    for parameter in parameters:
        fault = _fault(parameter, by_name)
        if fault is not None:
            raise PlanError(f"the plan for {parameter.name} is wrong: {fault}")


def _fault(parameter: PlannedParameter, by_name: Mapping[str, PlannedParameter]) -> str | None:
    if parameter.alias_of is not None:
        return _alias_fault(parameter, by_name.get(parameter.alias_of))
    if parameter.produced_by is not None:
        return _product_fault(parameter, by_name.get(parameter.produced_by))
    for copy in parameter.copies:
        fault = _copy_fault(copy, parameter)
        if fault is not None:
            return fault
    return (
        _dtype_fault(parameter)
        or _quantization_fault(parameter, by_name)
        or _coverage_fault(parameter.source_shape, _written(parameter))
    )


_coverage_fault = functools.lru_cache(maxsize=1024)(coverage_fault)
"""Layers repeat the same boxes: each shape and its boxes are looked at once."""


def _written(parameter: PlannedParameter) -> tuple[Box, ...]:
    return (*(copy.destination for copy in parameter.copies), *parameter.zeros)


def _copy_fault(copy: Copy, parameter: PlannedParameter) -> str | None:
    if not is_inside(copy.source, copy.tensor.shape):
        return f"{copy.source} is not inside {copy.tensor.name} of shape {copy.tensor.shape}"
    if not _fits(copy):
        return f"{copy.source} of {copy.tensor.name} does not fit {copy.destination}"
    if not copy.source.volume:
        return f"the copy from {copy.tensor.name} is empty"
    if copy.tensor.dtype != parameter.source_dtype:
        return f"{copy.tensor.name} is {copy.tensor.dtype}, not {parameter.source_dtype}"
    return None


def _dtype_fault(parameter: PlannedParameter) -> str | None:
    if not parameter.copies or isinstance(parameter.transform, Quantize):
        return None
    made = parameter.source_dtype if parameter.transform is None else parameter.transform.dtype
    return None if made == parameter.dtype else f"its copies make {made}, it is stored as {parameter.dtype}"


def _quantization_fault(parameter: PlannedParameter, by_name: Mapping[str, PlannedParameter]) -> str | None:
    if not isinstance(parameter.transform, Quantize):
        return None
    if not parameter.source_dtype or not math.prod(parameter.source_shape):
        return "there is nothing to quantize"
    for number, product in enumerate(parameter.transform.products):
        planned = by_name.get(product.name)
        if planned is None or (parameter.name if number else None) != planned.produced_by:
            return f"{product.name}, which its quantization makes, is not planned as its own"
        if (planned.shape, planned.dtype) != (product.shape, product.dtype):
            return f"{product.name} is stored as {planned.dtype} {planned.shape}, not {product.dtype} {product.shape}"
        if not _is_share(product, parameter.source_shape):
            return f"{product.name} of shape {product.shape} is not made row by row of {parameter.source_shape}"
    return None if parameter.transform.products[0].name == parameter.name else "it is not what its quantization makes"


def _is_share(product: Product, weight: Shape) -> bool:
    """Whether each matrix of the weight has an equal share of the product, of as many rows as it says."""
    stack, rows = weight[:-2], weight[-2]
    if product.rows is None:
        return product.shape[: len(stack)] == stack
    return product.shape[:-1] == (*stack, -(-rows // product.rows))


def _alias_fault(parameter: PlannedParameter, target: PlannedParameter | None) -> str | None:
    if parameter.copies or parameter.zeros or parameter.transform or parameter.produced_by:
        return "an alias is written by itself"
    if target is None or target.alias_of is not None:
        return f"it is an alias of {parameter.alias_of}, which is no parameter with a place"
    if (target.shape, target.dtype) != (parameter.shape, parameter.dtype):
        return f"it has another shape or dtype than {target.name}"
    return None


def _product_fault(parameter: PlannedParameter, weight: PlannedParameter | None) -> str | None:
    if parameter.copies or parameter.zeros or parameter.transform:
        return "what quantization produces is written by itself"
    if weight is None or not isinstance(weight.transform, Quantize):
        return f"{parameter.produced_by} is not quantized"
    if all(product.name != parameter.name for product in weight.transform.products[1:]):
        return f"{parameter.produced_by} does not produce it"
    return None


def _fits(copy: Copy) -> bool:
    """Whether the boxes have equal shapes: the matrices exactly where they are transposed, else but for axes of one."""
    source, destination = copy.source.shape, copy.destination.shape
    if copy.transposed:
        if min(len(source), len(destination)) < 2 or copy.source.swapped.shape[-2:] != destination[-2:]:
            return False
        source, destination = source[:-2], destination[:-2]
    return source == destination or _squeezed(source) == _squeezed(destination)


def _squeezed(shape: Shape) -> Shape:
    return tuple([extent for extent in shape if extent != 1])
