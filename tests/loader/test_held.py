"""Held matrices: measured before they are quantized, two at a time, and nobody waits for a thread that failed."""

import threading

import pytest

from weightcached.loader.boxes import whole
from weightcached.loader.destination import Abandoned
from weightcached.loader.held import HELD_MAX, Held, staggered
from weightcached.loader.planned import Copy, PlannedParameter, TensorHeader
from weightcached.loader.quantizers import quantizer
from weightcached.loader.slabs import slabs
from weightcached.protocol.quantization import Quantization


def weight(name: str, rows: int = 4, *, stack: int = 1) -> PlannedParameter:
    """A float16 matrix of 8 columns, or a stack of them, that has one scale each."""
    shape = (stack, rows, 8)
    transform = quantizer(name, shape, Quantization.named("fp8-tensor"), dtype="float16")
    tensor = TensorHeader(name, "float16", shape, "f", 0, stack * rows * 16)
    copies = (Copy(tensor, whole(shape), whole(shape)),)
    return PlannedParameter(name, shape, "float8_e4m3fn", "float16", copies, transform=transform)


def row_slabs(*weights: PlannedParameter):
    return [slab for one in weights for slab in slabs(one, slab_nbytes=32)]


def held_for() -> Held:
    return Held([weight("largest", 4)])


def steps(made) -> str:
    """One word a slab: m (measure) or q (quantize), the parameter, the row."""
    return " ".join(f"{slab.step[0]}{slab.parameter.name}{slab.first // 8}" for slab in made)


def test_matrices_are_read_while_those_before_them_are_quantized():
    made = row_slabs(weight("a", 3), weight("b", 3), weight("c", 1))
    assert steps(staggered(made)) == "ma0 ma1 ma2 mb0 qa0 mb1 qa1 mb2 qa2 mc0 qb0 qb1 qb2 qc0"


def test_no_third_matrix_is_begun_before_the_first_is_done():
    made = row_slabs(weight("a", 4), weight("b", 1), weight("c", 2))
    assert steps(staggered(made)) == "ma0 ma1 ma2 ma3 mb0 qa0 qa1 qa2 qa3 mc0 qb0 mc1 qc0 qc1"
    stack = row_slabs(weight("s", 2, stack=3))
    assert steps(staggered(stack)) == "ms0 ms1 ms2 qs0 ms3 qs1 ms4 qs2 ms5 qs3 qs4 qs5"


def test_what_one_matrix_waits_in_is_used_for_the_next():
    held = held_for()
    (first, *_), (second, *_) = row_slabs(weight("a", 1)), row_slabs(weight("b", 1))
    held.memory(first)[:] = bytes(range(16))
    assert bytes(held.memory(first)) == bytes(range(16))
    held.measured(first, 1.0)
    held.finished(first)
    assert bytes(held.memory(second)) == bytes(range(16))


def test_the_largest_is_that_of_the_whole_matrix():
    held = held_for()
    made = row_slabs(weight("a", 3))
    for slab, value in zip(made[:3], (2.0, 7.0, 3.0), strict=True):
        held.memory(slab)
        held.measured(slab, value)
    assert [held.largest(slab) for slab in made[3:]] == [7.0] * 3


def waits(work) -> threading.Thread:
    """A thread in ``work``, which has to wait there."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def test_nothing_is_quantized_before_all_is_measured():
    held, heard = held_for(), []
    made = row_slabs(weight("a", 2))
    for slab in made[:2]:
        held.memory(slab)
    held.measured(made[0], 1.0)
    waiting = waits(lambda: heard.append(held.largest(made[2])))
    held.measured(made[1], 5.0)
    waiting.join()
    assert heard == [5.0]


def test_another_matrix_waits_for_room():
    held, heard = held_for(), []
    first, second, third = (row_slabs(weight(name, 1))[0] for name in "abc")
    assert HELD_MAX == 2
    held.memory(first)
    held.memory(second)
    waiting = waits(lambda: heard.append(held.memory(third)))
    held.measured(first, 1.0)
    held.finished(first)
    waiting.join()
    assert len(heard) == 1


def test_nobody_waits_for_a_thread_that_failed():
    held, heard = held_for(), []
    made = row_slabs(weight("a", 1), weight("b", 1), weight("c", 1))

    def wait(work):
        with pytest.raises(Abandoned):
            work()
        heard.append("abandoned")

    held.memory(made[0])
    held.memory(made[2])
    threads = [
        waits(lambda: wait(lambda: held.largest(made[1]))),
        waits(lambda: wait(lambda: held.memory(made[4]))),
    ]
    held.abandon()
    for thread in threads:
        thread.join()
    assert heard == ["abandoned"] * 2
