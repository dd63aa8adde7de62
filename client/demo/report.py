"""Owns what the demo says about what it has measured: one table, the verdicts, the next commands. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from weightcached.client.demo.embeddings import EmbeddingStory
from weightcached.client.demo.engines import NEW_TOKENS, PROMPT, EngineStory
from weightcached.client.demo.shards import ShardStory
from weightcached.client.demo.table import Group, gigabytes, render, seconds

_WARM_NOTE = """\
What the table shows, and what it does not:
- A file in the page cache whose layout is what the engine wants can be mapped as it is: the warm start from disk is
  nearly free too, and the daemon cannot be faster than that. Most of a start here is importing torch and Transformers.
- A cold file costs where its pages are first used: in the weights column or in the first token after it.
- The lower half is where making the shard is work. A fused or quantized shard lies in no file, so every start makes it
  anew, or the daemon makes it once. "in hand" is until every tensor is there, "touched" until every page was read.
"""


def table(engines: EngineStory, shards: Sequence[ShardStory]) -> str:
    """The one table: engine starts, WeightSets, memory."""
    starts = Group("engine starts (layout hf; seconds)", ("weights", "imports", "to first token", "shared"))
    for start in engines.starts:
        shared = None if start.shared_bytes is None else gigabytes(start.shared_bytes)
        starts.add(
            start.label, seconds(start.weights_s), seconds(start.imports_s), seconds(start.first_token_s), shared
        )
    sets = Group("WeightSet without an engine (seconds)", ("in hand", "touched", "", "shared"))
    for story in shards:
        sets.add(f"{story.shard.label}: from disk, cold", *_cells(story.cold.in_hand_s, story.cold.touched_s), "", None)
        sets.add(f"{story.shard.label}: from disk, warm", *_cells(story.warm.in_hand_s, story.warm.touched_s), "", None)
        shared = gigabytes(story.daemon.resident_bytes)
        sets.add(
            f"{story.shard.label}: from the daemon", *_cells(story.daemon.in_hand_s, story.daemon.touched_s), "", shared
        )
    memory = Group("memory while the last engine ran", ("its own", "shared", "", ""))
    for label, kinds in (("daemon", engines.daemon_memory), ("engine", engines.engine_memory)):
        memory.add(label, gigabytes(kinds["RssAnon"]), gigabytes(kinds["RssShmem"]), "", "")
    return render([starts, sets, memory])


def _cells(*values: float) -> list[str]:
    return [seconds(value) for value in values]


def notes(engines: EngineStory, shards: Sequence[ShardStory]) -> str:
    """What has to be known to read the table, with what this machine did differently."""
    lines = [_WARM_NOTE.rstrip()]
    lines.append(
        f"- The daemon was ready {seconds(engines.daemon_ready_s)} s after its start (Python, reading, digests of all "
        "bytes); an engine pays that never, or once when it is started too early."
    )
    fractions = [engines.cached_fraction, *(story.cold.cached_fraction or 0.0 for story in shards)]
    if max(fractions) > 0.01:
        lines.append(
            f"- NOT COLD: up to {max(fractions):.0%} of the files stayed in the page cache although they were dropped "
            "(a file system in memory, or pages that another process has mapped): read the cold rows as warm ones."
        )
    return "\n".join(lines)


def answers(engines: EngineStory) -> str:
    """The token ids, and whether they are the same."""
    width = max(map(len, engines.answers))
    lines = [
        f"greedy continuation of {PROMPT!r}, {NEW_TOKENS} tokens (random weights: it means nothing, but it repeats)"
    ]
    lines += [f"  {who:<{width}}  {list(ids)}" for who, ids in engines.answers.items()]
    lines.append(f"  {verdict(engines.agrees)}: {len(engines.answers)} answers, the same token ids")
    return "\n".join(lines)


def bytes_agree(shards: Sequence[ShardStory]) -> str:
    """One line: whether what the daemon serves is what the disk gives."""
    return f"{verdict(all(s.agrees for s in shards))}: WeightSets from the daemon and from disk, all bytes the same"


def embeddings(story: EmbeddingStory) -> str:
    return "\n".join(
        [
            f"all-MiniLM-L6-v2 (real weights): {story.vectors} texts, vectors of {story.size} numbers",
            f"  from disk against from the daemon: smallest cosine {story.cosine_min:.9f}, "
            f"largest difference {story.difference_max:g}",
            f"  it is the model it should be: like sentences {story.similar:.2f}, unlike sentences {story.unlike:.2f}",
            f"  {verdict(story.bit_exact)}: embeddings equal bit for bit",
        ]
    )


def verdict(good: bool) -> str:
    return "OK" if good else "MISMATCH"


def try_next(command: str, model: Path | None, kept: Path | None) -> str:
    """Commands that work as they stand, in a shell in the same directory."""
    lines = ["Try next:", "", '  export WEIGHTCACHED_RUNTIME_DIR="$HOME/.weightcached"']
    if model is not None:
        quoted = shlex.quote(str(model))
        lines += [
            f"  {command} serve --model {quoted} &",
            f"  {command} wait --tp-size 1 --timeout 60",
            f'  {command} engine --model {quoted} --weight-cache-mode require --prompt "hello"',
            f"  {command} status",
            "  kill %1",
        ]
    if kept is not None:
        quoted = shlex.quote(str(kept))
        lines += ["", f"  {command} up --model {quoted} --layout fused --tp-size 2     # both ranks, until Ctrl-C"]
    lines += [f"  {command} --help"]
    return "\n".join(lines)
