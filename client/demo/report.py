"""Owns what the demo says about what it has measured: one table, notes to it, the verdicts, the next commands. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from weightcached.client.demo.embeddings import EmbeddingStory
from weightcached.client.demo.engines import NEW_TOKENS, PROMPT, EngineStory
from weightcached.client.demo.shards import ShardStory, Timing
from weightcached.client.demo.table import Group, decimal_size, render, seconds

LINE_WIDTH = 110

_COLUMNS = (
    '"weights" is until they are in the module, "first token" from there to the first token of the answer, "imports" '
    'Python, libraries and tokenizer, "total" from the start of the process to the first token. "in hand" is until '
    'every tensor is there, "touched" until every page of it was read too.'
)
_WARM = (
    "A file in the page cache whose layout is what the engine wants can be mapped as it is, so the warm start from "
    "disk is nearly free too. Most of a start here is importing torch and Transformers, whatever the weights do. A "
    "cold file costs where its pages are first used: in the weights, or in the first token after them."
)
_SHARDS = (
    "A fused or quantized shard lies in no file: every start makes it anew, or the daemon makes it once. In these rows "
    "the daemon saves work also while the files are warm."
)


def table(engines: EngineStory, shards: Sequence[ShardStory]) -> str:
    """The one table: engine starts, WeightSets, memory."""
    starts = Group("ENGINE STARTS (layout hf), seconds", ("weights", "first token", "imports", "total", "shared"))
    for start in engines.starts:
        spans = (start.weights_s, start.first_token_s, start.imports_s, start.total_s)
        shared = None if start.shared_bytes is None else decimal_size(start.shared_bytes)
        starts.add(start.label, *map(seconds, spans), shared)
    sets = Group("WEIGHTSETS, no engine, seconds", ("in hand", "touched", "", "", "shared"))
    for story in shards:
        for way, timing in (("from disk, cold", story.cold), ("from disk, warm", story.warm)):
            sets.add(f"{story.shard.label}, {way}", *_seconds_of(timing), "", "", None)
        shared = decimal_size(story.daemon.resident_bytes)
        sets.add(f"{story.shard.label}, from the daemon", *_seconds_of(story.daemon), "", "", shared)
    memory = Group("MEMORY while the last engine ran", ("its own", "shared", "", "", ""))
    for label, kinds in (("daemon", engines.daemon_memory), ("engine", engines.engine_memory)):
        memory.add(label, decimal_size(kinds["RssAnon"]), decimal_size(kinds["RssShmem"]), "", "", "")
    return render([starts, sets, memory])


def _seconds_of(timing: Timing) -> tuple[str, str]:
    return seconds(timing.in_hand_s), seconds(timing.touched_s)


def notes(engines: EngineStory, shards: Sequence[ShardStory]) -> str:
    """What has to be known to read the table, with what this machine did differently."""
    found = [_COLUMNS, _WARM, _SHARDS]
    found.append(
        f"The daemon was ready {seconds(engines.daemon_ready_s)} s after its start (Python, reading every byte, "
        "sealing). That is paid once, and by no engine that starts later."
    )
    fractions = [engines.cached_fraction, *(story.cold.cached_fraction or 0.0 for story in shards)]
    if max(fractions) > 0.01:
        found.append(
            f"NOT COLD: up to {max(fractions):.0%} of the files stayed in the page cache although they were dropped "
            "(a file system in memory, or pages that another process has mapped): read the cold rows as warm ones."
        )
    return "\n".join(textwrap.fill(note, LINE_WIDTH, initial_indent="- ", subsequent_indent="  ") for note in found)


def answers(engines: EngineStory) -> str:
    """The token ids, and whether they are the same."""
    width = max(map(len, engines.answers))
    lines = [f"Greedy continuation of {PROMPT!r}, {NEW_TOKENS} tokens (random weights: nonsense, but always the same):"]
    lines += [f"  {who:<{width}}  {list(ids)}" for who, ids in engines.answers.items()]
    lines.append(f"  {verdict(engines.agrees)}: {len(engines.answers)} answers, the same token ids")
    return "\n".join(lines)


def bytes_agree(shards: Sequence[ShardStory]) -> str:
    """One line: whether what the daemon serves is what the disk gives."""
    good = all(story.agrees for story in shards)
    return (
        f"WeightSets:\n  {verdict(good)}: {len(shards)} shards, the same names and bytes from the daemon and from disk"
    )


def embeddings(story: EmbeddingStory) -> str:
    """The real model's lines."""
    return "\n".join(
        [
            f"all-MiniLM-L6-v2 (real weights): {story.vectors} texts, vectors of {story.size} numbers",
            f"  from disk against from the daemon: smallest cosine {story.cosine_min:.9f}, "
            f"largest difference {story.difference_max:g}",
            f"  cosine of two like sentences {story.similar:.2f}, of two unlike ones {story.unlike:.2f}",
            f"  {verdict(story.bit_exact)}: embeddings equal bit for bit",
        ]
    )


def verdict(good: bool) -> str:
    return "OK" if good else "MISMATCH"


def try_next(command: str, model: Path | None, kept: Path | None) -> str:
    """Commands that work as they stand, in a shell in the same directory."""
    lines = ["Try next:", "", '  export WEIGHTCACHED_RUNTIME_DIR="$HOME/.weightcached"']
    if model is not None:
        lines += [
            f"  MODEL={shlex.quote(str(model))}",
            f'  {command} serve --model "$MODEL" &',
            f"  {command} wait --tp-size 1 --timeout 60",
            f'  {command} engine --model "$MODEL" --weight-cache-mode require --prompt "hello"',
            f"  {command} status",
            "  kill %1",
        ]
    if kept is not None:
        lines += [f"  {command} up --model {shlex.quote(str(kept))} --layout fused --tp-size 2     # until Ctrl-C"]
    lines += [f"  {command} --help"]
    return "\n".join(lines)
