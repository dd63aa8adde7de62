"""BERT, an encoder: as an embedding model, and with a head over sequences, tokens or words, each under engines' names.

All three embeddings are cut and padded like vocabularies. What makes scores is float32 whatever the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightcached.loader.architectures.blocks import Block
from weightcached.loader.architectures.ranks import Rank
from weightcached.loader.architectures.rows import (
    Column,
    Qkv,
    Replicated,
    Row,
    RowParallel,
    Vocabulary,
    Wanted,
    layer_norm,
)
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
LEGACY = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
"""How the first checkpoints spell norms."""


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


@dataclass(frozen=True, slots=True)
class MaskedWords:
    """The output projection over the vocabulary, whole on every rank: where tied, the word embeddings once more."""

    name: str

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        is_tied = model.switch("tie_word_embeddings")
        source = "bert.embeddings.word_embeddings" if is_tied else "cls.predictions.decoder"
        yield from Replicated(self.name, ("vocabulary", "hidden"), source=f"{source}.weight").wanted(model, rank)


MASKED_WORDS = (
    Replicated("mlm_head.dense.weight", ("hidden", "hidden"), source="cls.predictions.transform.dense.weight"),
    Replicated("mlm_head.dense.bias", ("hidden",), source="cls.predictions.transform.dense.bias"),
    Replicated("mlm_head.layer_norm.weight", ("hidden",), source="cls.predictions.transform.LayerNorm.weight"),
    Replicated("mlm_head.layer_norm.bias", ("hidden",), source="cls.predictions.transform.LayerNorm.bias"),
    MaskedWords("mlm_head.decoder.weight"),
    Replicated("mlm_head.decoder.bias", ("vocabulary",), source="cls.predictions.bias"),
)


def _ignored(at: str) -> tuple[Ignore, ...]:
    return (Ignore(f"{at}.embeddings.position_ids", "the numbers from 0: the engine makes its own"),)


def _unused_pooler(at: str) -> Ignore:
    return Ignore(f"{at}.pooler.dense.*", "a pooler that engines do not use for this task")


BERT = Architecture(
    names=("BertModel",),
    rows=_encoder("model"),
    ignored=(*_ignored("model"), _unused_pooler("model")),
    sizes=SIZES,
    spellings=({"model.": "model.", **LEGACY}, {"model.": "", **LEGACY}, {"model.": "model."}, {"model.": ""}),
)

BERT_MASKED = Architecture(
    names=("BertForMaskedLM",),
    rows=(*_encoder("bert"), *MASKED_WORDS),
    ignored=(
        *_ignored("bert"),
        _unused_pooler("bert"),
        Ignore("cls.predictions.decoder.bias", "another name of cls.predictions.bias"),
        Ignore(
            "cls.predictions.decoder.weight",
            "tied: it is bert.embeddings.word_embeddings.weight (tie_word_embeddings)",
            switch="tie_word_embeddings",
        ),
        Ignore("cls.seq_relationship.*", "predicts the next sentence, which is no part of this model"),
    ),
    defaults={"tie_word_embeddings": True},
    sizes=SIZES,
    spellings=(LEGACY, {}),
)

BERT_SEQUENCES = Architecture(
    names=("BertForSequenceClassification",),
    rows=(*_encoder("bert"), *POOLER, *CLASSIFIER),
    ignored=_ignored("bert"),
    sizes=SIZES,
    spellings=(LEGACY, {}),
)

BERT_TOKENS = Architecture(
    names=("BertForTokenClassification",),
    rows=(*_encoder("bert"), *CLASSIFIER),
    ignored=(*_ignored("bert"), _unused_pooler("bert")),
    sizes=SIZES,
    spellings=(LEGACY, {}),
)
