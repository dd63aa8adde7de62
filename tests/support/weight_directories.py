"""Directories that are checkpoints by their file names only: what identity of content looks at. No tensors inside."""

import json
from collections.abc import Mapping
from pathlib import Path

from weightcached.protocol.content import Receipts, open_weights, take_receipts, weight_files
from weightcached.protocol.index_file import INDEX_NAME


def make(directory: Path, files: Mapping[str, bytes], index: Mapping[str, str] | None = None) -> Path:
    """Writes the files, and an index with ``index`` as its map. Returns ``directory``."""
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    if index is not None:
        (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return directory


def receipts_of(directory: Path) -> Receipts:
    """The receipts of the directory's weights now."""
    with open_weights(weight_files(directory)) as weights:
        return take_receipts(weights)
