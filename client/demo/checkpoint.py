"""Owns the demo's checkpoint: a Qwen2 decoder of a chosen size with random weights and a small byte-level tokenizer.

Real in everything but what it says: configuration, several safetensors files with an index, tokenizer. The bytes follow
from the tensors' names, so two runs make the same model. Written with NumPy and `tokenizers` alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

FILES_MIN = 3
FILE_BYTES = 256 * 1024 * 1024
LAYERS_MIN = 4
WIDTHS = (2048, 1024, 512, 256)
CONTEXT = 2048
END = "<|end|>"

# What the tokenizer's merges are learnt from; any text would do.
TEXT = """
What memcached is to objects, weightcached is to model weights: a small daemon that keeps them resident, so that the
process that uses them can die and come back in seconds. Loading weights is the one stage of an inference engine where
everything waits. So pay the disk once, keep the finished shard in memory that outlives the engine, and hand it to every
engine that restarts.
"""


@dataclass(frozen=True)
class DemoCheckpoint:
    """What was written. ``nbytes`` counts the weight files."""

    directory: Path
    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    layers: int
    hidden_size: int


def make_checkpoint(directory: Path, *, nbytes: int) -> DemoCheckpoint:
    """Writes a checkpoint of about ``nbytes`` into ``directory`` (made), and waits until it is on the disk."""
    directory.mkdir(parents=True)
    vocabulary = write_tokenizer(directory)
    config = _config(nbytes, vocabulary)
    shapes = _shapes(config)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    names = _write_weights(directory, shapes)
    files = tuple(directory / name for name in names)
    return DemoCheckpoint(
        directory=directory,
        files=files,
        tensors=len(shapes),
        nbytes=sum(file.stat().st_size for file in files),
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
    )


def write_tokenizer(directory: Path) -> int:
    """Byte-level BPE: every text has tokens. Returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": CONTEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return int(tokenizer.get_vocab_size())


def _config(nbytes: int, vocabulary: int) -> dict[str, Any]:
    """The widest Qwen2 of at least LAYERS_MIN layers that comes nearest to ``nbytes``."""
    for width in WIDTHS:
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "torch_dtype": "bfloat16",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "num_hidden_layers": LAYERS_MIN,
            "num_attention_heads": width // 128,
            "num_key_value_heads": max(width // 512, 2),
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "eos_token_id": 0,
        }
        least = _nbytes(config)
        layer = (least - _nbytes({**config, "num_hidden_layers": 0})) // LAYERS_MIN
        extra = round((nbytes - least) / layer)
        if extra >= 0 or width == WIDTHS[-1]:
            return {**config, "num_hidden_layers": LAYERS_MIN + max(extra, 0)}
    raise AssertionError("unreachable: the last width returns")


def _nbytes(config: dict[str, Any]) -> int:
    total = 0
    for shape in _shapes(config).values():
        count = 2
        for size in shape:
            count *= size
        total += count
    return total


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, as Transformers names them for Qwen2."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for part, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{layer}.self_attn.{part}.weight"] = (rows, hidden)
            shapes[f"{layer}.self_attn.{part}.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _write_weights(directory: Path, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Deals the tensors, in order, over files of about FILE_BYTES; writes these and the index. Returns file names."""
    sizes = {name: 2 * _count(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    number = max(FILES_MIN, -(-total // FILE_BYTES))
    dealt: list[list[str]] = [[] for _ in range(number)]
    before = 0
    for name, size in sizes.items():
        dealt[before * number // total].append(name)
        before += size
    files = {f"model-{at:05}-of-{number:05}.safetensors": names for at, names in enumerate(dealt, 1)}
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda item: _write_file(directory / item[0], item[1], shapes), files.items()):
            pass
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return list(files)


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _write_file(path: Path, names: list[str], shapes: dict[str, tuple[int, ...]]) -> None:
    """One safetensors file: length of the header, header, bytes. NumPy has no bfloat16, so it is written by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + 2 * _count(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _bf16_bits(name, shapes[name]):
                file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())  # a page that is dirty cannot be dropped from the page cache


def _bf16_bits(name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """The tensor's bits in pieces: ones for norms; else random signs and mantissas, magnitudes from 2⁻⁸ to 2⁻⁴."""
    import numpy as np

    count = _count(shape)
    if name.endswith("norm.weight"):
        yield np.full(count, 0x3F80, dtype=np.uint16)
        return
    key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    random = np.random.Generator(np.random.Philox(key=key))
    piece = 8 * 1024 * 1024
    for start in range(0, count, piece):
        bits = np.frombuffer(bytearray(random.bytes(2 * min(piece, count - start))), dtype="<u2")
        bits &= 0x81FF  # the sign, two bits for the exponent, the mantissa
        bits += 119 << 7  # exponents 119 to 122
        yield bits
