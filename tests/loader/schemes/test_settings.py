"""``quantization_config`` as somebody else wrote it: patterns mean whole components, and no value goes unchecked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quantized_cases import CASES
from weightcached.loader.schemes import method_of
from weightcached.loader.schemes.settings import Patterns
from weightcached.protocol.errors import ModelConfigError, WeightCacheError

MODULE = "model.layers.10.mlp.gate_up_proj"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (MODULE, True),
        ("gate_up_proj", True),
        ("mlp.gate_up_proj", True),
        ("model.layers.10", True),
        ("mlp", True),
        ("up_proj", False),
        ("mlp.gate", False),
        ("model.layers.1", False),
        ("", False),
        (r"re:.*\.mlp\..*", True),
        (r"re:mlp", False),
        (r"re:.*layers\.1\.", False),
    ],
)
def test_patterns_name_whole_components_or_match_from_the_start(pattern, names):
    assert Patterns.of((pattern,)).name(MODULE) is names


@pytest.mark.parametrize("expression", ["(", "a{99999999999}"])
def test_a_pattern_that_is_no_regular_expression(expression):
    with pytest.raises(ModelConfigError, match="regular expression"):
        Patterns.of((f"re:{expression}",)).name(MODULE)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoiled(draw):
    """One of the cases' settings with one value, at any depth, replaced or removed."""
    whole = draw(st.sampled_from([quantization for quantization, _ in CASES.values()]))

    def copied(value):
        return {key: copied(item) for key, item in value.items()} if isinstance(value, dict) else value

    made = at = copied(whole)
    while True:
        key = draw(st.sampled_from(sorted(at)))
        if isinstance(at[key], dict) and at[key] and draw(st.booleans()):
            at = at[key]
            continue
        if draw(st.booleans()):
            at[key] = draw(values)
        else:
            del at[key]
        return made


@settings(deadline=None, max_examples=300)
@given(spoiled())
def test_settings_of_any_shape_are_understood_or_refused_with_a_reason(quantization):
    refusal = None
    try:
        method = method_of({"quantization_config": quantization})
        if method is not None:
            method.scheme_of("model.layers.0.mlp.down_proj", ())
    except WeightCacheError as error:
        refusal = error
    assert refusal is None or refusal.expected or refusal.found
