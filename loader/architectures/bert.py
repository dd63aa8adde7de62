"""BERT, an encoder: as an embedding model, and with a classifier over sequences or tokens, each under engines' names.

All three embeddings are cut and padded like vocabularies. What makes scores is float32 whatever the model is.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightcached.loader.architectures.blocks import Block
from weightcached.loader.architectures.rows import Column, Qkv, Replicated, Row, RowParallel, Vocabulary, layer_norm
from weightcached.loader.architectures.shape import PLAIN_HEADS, ModelShape, Size, SizeRule, named
from weightcached.loader.architectures.table import Architecture, Ignore
from weightcached.protocol.errors import ModelConfigError
from weightcached.protocol.text import shown

LAYER = (
    Qkv(
        "attention.self.qkv_proj",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        inputs="hidden",
        bias=True,
    ),
    RowParallel("attention.output.dense", outputs="hidden", inputs="queries", bias=True),
    *layer_norm("attention.output.LayerNorm"),
    Column("intermediate.dense", parts=("intermediate.dense",), outputs="intermediate", inputs="hidden", bias=True),
    RowParallel("output.dense", outputs="hidden", inputs="intermediate", bias=True),
    *layer_norm("output.LayerNorm"),
)

CLASSIFIER = (
    Replicated("classifier.weight", ("labels", "hidden"), dtype="float32"),
    Replicated("classifier.bias", ("labels",), dtype="float32"),
)
POOLER = (
    Replicated("bert.pooler.dense.weight", ("hidden", "hidden"), dtype="float32"),
    Replicated("bert.pooler.dense.bias", ("hidden",), dtype="float32"),
)
UNUSED_POOLER = "a pooler that engines do not use for this task"


def _labels(model: ModelShape) -> int:
    """As many as have names; two where ``config.json`` names none."""
    names = model.value("id2label")
    if names is None:
        return 2
    if not isinstance(names, Mapping) or not names:
        raise ModelConfigError(
            "config.json's id2label is unusable", expected="an object with a name for each label", found=shown(names)
        )
    return len(names)


SIZES: Mapping[Size, SizeRule] = {
    **PLAIN_HEADS,
    "position_table": named("max_position_embeddings"),
    "token_type_table": named("type_vocab_size"),
    "labels": _labels,
}


def _encoder(at: str) -> tuple[Row, ...]:
    return (
        Vocabulary(f"{at}.embeddings.word_embeddings"),
        Vocabulary(f"{at}.embeddings.position_embeddings", rows="position_table"),
        Vocabulary(f"{at}.embeddings.token_type_embeddings", rows="token_type_table"),
        *layer_norm(f"{at}.embeddings.LayerNorm"),
        Block(f"{at}.encoder.layer", count="layers", rows=LAYER),
    )


def _ignored(at: str) -> tuple[Ignore, ...]:
    return (Ignore(f"{at}.embeddings.position_ids", "the numbers from 0: the engine makes its own"),)


BERT = Architecture(
    names=("BertModel",),
    rows=_encoder("model"),
    ignored=(*_ignored("model"), Ignore("model.pooler.dense.*", UNUSED_POOLER)),
    sizes=SIZES,
    spellings=({"model.": "model."}, {"model.": ""}),
)

BERT_SEQUENCES = Architecture(
    names=("BertForSequenceClassification",),
    rows=(*_encoder("bert"), *POOLER, *CLASSIFIER),
    ignored=_ignored("bert"),
    sizes=SIZES,
)

BERT_TOKENS = Architecture(
    names=("BertForTokenClassification",),
    rows=(*_encoder("bert"), *CLASSIFIER),
    ignored=(*_ignored("bert"), Ignore("bert.pooler.dense.*", UNUSED_POOLER)),
    sizes=SIZES,
)
