import hashlib
import json
import struct
from pathlib import Path

import pytest

from weightcached.client.demo.checkpoint import CONTEXT, END, TEXT, make_checkpoint, write_tokenizer
from weightcached.protocol.content import weight_files


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def header(path: Path) -> dict[str, dict[str, object]]:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        parsed: dict[str, dict[str, object]] = json.loads(file.read(length))
    return parsed


@pytest.mark.parametrize("nbytes", [8_000_000, 40_000_000])
def test_it_has_about_the_size_asked_for_in_several_files(tmp_path: Path, nbytes: int) -> None:
    made = make_checkpoint(tmp_path / "m", nbytes=nbytes)
    assert made.nbytes == pytest.approx(nbytes, rel=0.2)
    assert len(made.files) >= 3
    files = weight_files(made.directory)
    assert files.index is not None
    assert {made.directory / name for name in files.names} == set(made.files)
    held = [name for file in made.files for name in header(file) if name != "__metadata__"]
    assert len(held) == len(set(held)) == made.tensors
    assert files.weight_map is not None
    assert set(files.weight_map) == set(held)


def test_two_runs_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        make_checkpoint(tmp_path / name, nbytes=8_000_000)
    assert digests(tmp_path / "one") == digests(tmp_path / "other")


def test_the_weights_are_no_constant_and_no_extreme(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    made = make_checkpoint(tmp_path / "m", nbytes=8_000_000)
    tensors = {name: tensor for file in made.files for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        values = tensor.float()
        assert torch.isfinite(values).all(), name
        if name.endswith("norm.weight"):
            assert (values == 1).all(), name
        else:
            assert 2**-8 <= values.abs().min() <= values.abs().max() < 2**-4, name
            assert values.unique().numel() > 100, name
            assert abs(values.mean()) < 0.01, name


def test_every_text_has_tokens_and_comes_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    size = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (TEXT, "Größe", "日本語", "\x00\x01"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert max(ids) < size
    assert len(tokenizer.encode(TEXT).ids) < len(TEXT) / 2  # merges were learnt
    assert tokenizer.token_to_id(END) == 0
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == CONTEXT
