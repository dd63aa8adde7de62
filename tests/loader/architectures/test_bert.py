"""BERT's tables against plain torch: all embeddings are padded and cut, what makes scores is whole and float32."""

import pytest
import torch
from safetensors.torch import save_file

from tests.support.execution import load
from tests.support.plain import Share, require_every_rank, tensors_of
from tests.support.written import write
from weightcached.protocol.errors import ModelConfigError, UnexpectedTensor, UnsupportedModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 200,
    "max_position_embeddings": 40,
}
CLASSES = {
    "BertModel": "model.",
    "BertForMaskedLM": "",
    "BertForSequenceClassification": "",
    "BertForTokenClassification": "",
}
"""What engines put before the names that Transformers writes."""


MASKED = {
    "cls.predictions.transform.dense.weight": "mlm_head.dense.weight",
    "cls.predictions.transform.dense.bias": "mlm_head.dense.bias",
    "cls.predictions.transform.LayerNorm.weight": "mlm_head.layer_norm.weight",
    "cls.predictions.transform.LayerNorm.bias": "mlm_head.layer_norm.bias",
    "cls.predictions.decoder.weight": "mlm_head.decoder.weight",
    "cls.predictions.bias": "mlm_head.decoder.bias",
}


def reference(prefix: str):
    def made_of(tensors, rank: Share):
        made = {}
        for stored, tensor in tensors.items():
            name = prefix + stored
            at, _, ending = name.rpartition(".")
            if stored in MASKED:
                made[MASKED[stored]] = tensor
            elif at.endswith(".query"):
                layer = stored.rpartition("query.")[0]
                others = (tensors[f"{layer}{part}.{ending}"] for part in ("key", "value"))
                made[f"{prefix}{layer}qkv_proj.{ending}"] = rank.qkv(tensor, *others, kv_heads=8)
            elif at.endswith("intermediate.dense"):
                made[name] = rank.rows(tensor)
            elif at.endswith("output.dense"):
                made[name] = rank.columns(tensor) if ending == "weight" else tensor
            elif at.endswith("_embeddings"):
                made[name] = rank.vocabulary(tensor)
            elif at.endswith("LayerNorm"):
                made[name] = tensor
            elif at in ("classifier", "bert.pooler.dense"):
                made[name] = tensor.float()
        if "mlm_head.dense.weight" in made:
            made.setdefault("mlm_head.decoder.weight", tensors["bert.embeddings.word_embeddings.weight"])
        return made

    return made_of


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", CLASSES)
def test_every_rank(tmp_path, architecture, size):
    no_keys_of_its_own = {"num_key_value_heads": 2, "head_dim": 8}
    directory = write(tmp_path, architecture, {**SIZES, "num_labels": 5, **no_keys_of_its_own})
    require_every_rank(directory, reference(CLASSES[architecture]), size=size)


def test_an_output_projection_of_its_own(tmp_path):
    directory = write(tmp_path, "BertForMaskedLM", {**SIZES, "tie_word_embeddings": False})
    assert "cls.predictions.decoder.weight" in tensors_of(directory)
    require_every_rank(directory, reference(""), size=2)


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_first_checkpoints_spell_norms_otherwise(tmp_path, architecture):
    directory = write(tmp_path, architecture, SIZES)
    today = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

    def respelled(name, spelling):
        return next((name.replace(a, b) for a, b in spelling.items() if name.endswith(a)), name)

    once = {b: a for a, b in today.items()}
    old = {respelled(name, once): tensor for name, tensor in tensors_of(directory).items()}
    assert sum(name.endswith(("gamma", "beta")) for name in old) >= 10
    save_file(old, directory / "model.safetensors")

    def as_of_today(tensors, rank):
        return reference(CLASSES[architecture])({respelled(n, today): t for n, t in tensors.items()}, rank)

    require_every_rank(directory, as_of_today, size=2)


def test_two_labels_where_config_json_names_none(tmp_path):
    directory = write(tmp_path, "BertForSequenceClassification", SIZES)
    assert "id2label" not in (directory / "config.json").read_text()
    require_every_rank(directory, reference(""), size=2)


def test_what_an_embedding_model_leaves_out(tmp_path):
    """The pooler, which is for training on sentence pairs, and the buffer of old files."""
    directory = write(tmp_path, "BertModel", SIZES)
    positions = {"embeddings.position_ids": torch.arange(40)[None]}
    save_file({**tensors_of(directory), **positions}, directory / "model.safetensors")
    require_every_rank(directory, reference("model."), size=2)
    ignored = load(directory, layout="fused", tp_size=1, tp_rank=0).prepared.plan.accounting.ignored
    assert ignored.keys() == {"pooler.dense.weight", "pooler.dense.bias", *positions}


def test_names_as_an_engine_has_them(tmp_path):
    directory = write(tmp_path, "BertModel", SIZES)
    tensors = {f"model.{name}": tensor for name, tensor in tensors_of(directory).items()}
    save_file(tensors, directory / "model.safetensors")
    pooler = {"model.pooler.dense.weight", "model.pooler.dense.bias"}
    require_every_rank(directory, reference(""), size=2)
    assert load(directory, layout="fused", tp_size=1, tp_rank=0).prepared.plan.accounting.ignored.keys() == pooler


def test_another_tensor_of_a_pooler_is_unexpected(tmp_path):
    directory = write(tmp_path, "BertModel", SIZES)
    save_file({**tensors_of(directory), "pooler.sparse.weight": torch.ones(1)}, directory / "model.safetensors")
    with pytest.raises(UnexpectedTensor) as caught:
        load(directory, layout="fused", tp_size=1, tp_rank=0)
    assert caught.value.found == "pooler.sparse.weight"


def test_tables_that_ranks_cannot_share_are_named(tmp_path):
    directory = write(tmp_path, "BertModel", {**SIZES, "num_attention_heads": 3, "hidden_size": 48, "vocab_size": 192})
    with pytest.raises(UnsupportedModel, match="position table of 40"):
        load(directory, layout="fused", tp_size=3, tp_rank=0)


@pytest.mark.parametrize("names", [[], {}, "two"])
def test_labels_that_are_no_names(names):
    from weightcached.loader.architectures.bert import BERT_TOKENS

    with pytest.raises(ModelConfigError, match="id2label"):
        BERT_TOKENS.shape_of({"id2label": names}).size("labels")
