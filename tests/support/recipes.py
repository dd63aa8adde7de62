"""How tests get an engine's recipe: the three steps of `weightcached engine`, without the clock between them."""

from pathlib import Path

from weightcached.client.engine import model
from weightcached.client.engine.model import Recipe


def recipe_of(directory: Path) -> Recipe:
    """Configuration, tokenizer and model class of the checkpoint in ``directory``."""
    model.import_transformers()
    config, tokenizer = model.read_config_and_tokenizer(directory)
    return Recipe(directory, config, tokenizer, model.import_model_class(config))
