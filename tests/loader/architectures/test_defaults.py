"""What tables take for absent keys is what Transformers' own config classes take: config.json leaves defaults out."""

import dataclasses

import pytest

from tests.support.written import transformers
from weightcached.loader.architectures import ARCHITECTURES
from weightcached.loader.architectures.ranks import Rank
from weightcached.protocol.errors import ModelConfigError


class Asked(dict):
    """Remembers what it was asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.keys_asked = set()

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)


def planned(table, config):
    """All that a table makes of ``config.json``; ``None`` where it refuses."""
    try:
        model = table.shape_of(config)
        return list(table.wanted(model, Rank(1, 0))), table.excuses(["lm_head.weight"], model)
    except ModelConfigError:
        return None


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_absent_key_is_the_config_class_s_default_or_an_error(architecture):
    """Never something else: a model of other sizes, or without its tied head, that nobody asked for."""
    kind = getattr(transformers, architecture).config_class
    asked = Asked(ARCHITECTURES[architecture].defaults)
    table = dataclasses.replace(ARCHITECTURES[architecture], defaults=asked)
    few_layers = {"num_hidden_layers": 4, "n_layer": 4}
    whole = {**kind().to_dict(), **few_layers}
    expected = planned(table, whole)
    assert expected is not None
    for key in asked.keys_asked - few_layers.keys():
        if hasattr(kind, key):
            without = {name: value for name, value in whole.items() if name != key}
            assert planned(table, without) in (expected, None), key
