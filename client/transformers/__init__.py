"""Models of Transformers with their parameters mapped from a daemon: see `README.md`. Imports neither torch nor it."""

from weightcached.client.transformers.loading import from_pretrained, weights_from_cache, weights_of

__all__ = ["from_pretrained", "weights_from_cache", "weights_of"]
