"""Every way in which two holders can differ is found, once, and named."""

from dataclasses import replace

import pytest

from tests.engines.held import Difference, Held, differences

WEIGHT = Held("bfloat16", (4, 2), "aa", ("a",))


def test_equal_holders_do_not_differ():
    assert differences({"a": WEIGHT}, {"a": replace(WEIGHT)}) == []


@pytest.mark.parametrize(
    ("changed", "what", "theirs", "mine"),
    [
        ({"dtype": "float16", "sha256": "bb"}, "dtype", "bfloat16", "float16"),
        ({"shape": (2, 4), "sha256": "bb"}, "shape", (4, 2), (2, 4)),
        ({"sha256": "bb"}, "sha256", "aa", "bb"),
        ({"names": ("a", "b")}, "names", ("a",), ("a", "b")),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(changed, what, theirs, mine):
    assert differences({"a": WEIGHT}, {"a": replace(WEIGHT, **changed)}) == [Difference("a", what, theirs, mine)]


def test_further_names_of_one_layer_s_memory_need_not_be_ours_and_ties_must():
    gate, wiring = "layers.0.mlp.gate.weight", "layers.0.mlp.experts.gate.weight"
    engine = {name: replace(WEIGHT, names=(wiring, gate)) for name in (gate, wiring)}
    assert differences(engine, {gate: replace(WEIGHT, names=(gate,))}) == []
    assert differences(engine, engine) == []
    assert {found.what for found in differences(engine, {})} == {"name"}
    other = "layers.1.mlp.gate.weight"
    for tied in (("embed.weight", "head.weight"), (gate, other)):
        engine = {name: replace(WEIGHT, names=tied) for name in tied}
        found = differences(engine, {tied[0]: replace(WEIGHT, names=tied[:1])})
        assert [difference.what for difference in found] == ["names", "name"]
    apart = {name: replace(WEIGHT, names=(name,)) for name in (gate, wiring)}
    together = {name: replace(WEIGHT, names=(wiring, gate)) for name in (gate, wiring)}
    assert [difference.what for difference in differences(apart, together)] == ["names", "names"]
    assert [difference.what for difference in differences(apart, {gate: apart[gate]})] == ["name"]


def test_a_name_that_only_one_has_is_a_difference():
    assert differences({"a": WEIGHT}, {}) == [Difference("a", "name", "bfloat16[4, 2]", "has none")]
    assert differences({}, {"a": WEIGHT}) == [Difference("a", "name", "has none", "bfloat16[4, 2]")]
