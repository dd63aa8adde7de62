"""Owns the demo's first part: one engine started four times on the same weights, and whether it always says the same.

From disk (cold and warm page cache), from the daemon, and from the daemon after the engine before it was killed with
SIGKILL in the middle of a request.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weightcached.client.demo import http as engine_http
from weightcached.client.demo.checkpoint import DemoCheckpoint
from weightcached.client.demo.page_cache import drop
from weightcached.client.demo.processes import Child, StepFailed, Workshop
from weightcached.protocol.deadline import Deadline

NAME = "demo"
PROMPT = "What memcached is to objects,"
NEW_TOKENS = 6
LONG_ANSWER_TOKENS = 1024
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class Start:
    """One start of the engine, in seconds: ``weights_s`` until they are in the module, ``first_token_s`` from there to
    the prompt's first token, ``imports_s`` for Python, libraries and tokenizer, ``total_s`` from the process's start
    to the first token."""

    label: str
    weights_s: float
    first_token_s: float
    imports_s: float
    total_s: float
    token_ids: tuple[int, ...]
    shared_bytes: int | None


@dataclass
class EngineStory:
    """What was seen. ``answers`` has every answer to the prompt, by who gave it."""

    starts: list[Start] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    daemon_ready_s: float = 0.0
    daemon_memory: dict[str, int] = field(default_factory=dict)
    engine_memory: dict[str, int] = field(default_factory=dict)
    cached_fraction: float = 0.0
    status: str = ""

    @property
    def agrees(self) -> bool:
        """Whether all answers are the same token ids (and there are some)."""
        return len(set(self.answers.values())) == 1 and all(self.answers.values())

    def add(self, start: Start) -> None:
        self.starts.append(start)
        self.answers[start.label] = start.token_ids


def tell(workshop: Workshop, checkpoint: DemoCheckpoint, say: Callable[[str], None]) -> EngineStory:
    """Runs the story; the daemon and all engines are ended when it returns. Raises StepFailed."""
    story = EngineStory()
    say("engine from disk, cold page cache: the weight files are dropped from the page cache first")
    story.cached_fraction = drop(checkpoint.files)
    story.add(_one_shot(workshop, checkpoint, "from disk, cold page cache"))
    say("engine from disk, warm page cache")
    story.add(_one_shot(workshop, checkpoint, "from disk, warm page cache"))

    say("daemon: loads the checkpoint once")
    daemon = _daemon(workshop, checkpoint, story)

    say("engine in client mode, serving HTTP; killed with SIGKILL in the middle of a request")
    first, url, start = _serving(workshop, checkpoint, "from the daemon, first start")
    story.add(start)
    story.answers["over HTTP"] = _over_http(url)
    _kill_while_answering(first, url)

    say("engine in client mode again")
    second, url, start = _serving(workshop, checkpoint, "from the daemon, after SIGKILL")
    story.add(start)
    story.answers["over HTTP, after SIGKILL"] = _over_http(url)
    story.engine_memory = second.memory_bytes()
    story.daemon_memory = daemon.memory_bytes()
    story.status = workshop.weightcached("status", "status").output().rstrip()
    second.terminate()
    daemon.terminate()
    return story


def _words(checkpoint: DemoCheckpoint, mode: str) -> list[str]:
    words = ["engine", "--model", str(checkpoint.directory), "--weight-cache-mode", mode, "--name", NAME, "--json"]
    return [*words, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]


def _one_shot(workshop: Workshop, checkpoint: DemoCheckpoint, label: str) -> Start:
    engine = workshop.weightcached("engine-off", *_words(checkpoint, "off"))
    ready = engine.json_line()
    engine.finish()
    return _start(label, ready)


def _serving(workshop: Workshop, checkpoint: DemoCheckpoint, label: str) -> tuple[Child, str, Start]:
    engine = workshop.weightcached("engine-client", *_words(checkpoint, "client"), "--port", "0")
    ready = engine.json_line()
    if ready["weights"]["source"] != "daemon":
        raise engine.failed(f"has its weights from {ready['weights']['source']}, not from the daemon")
    return engine, ready["url"], _start(label, ready)


def _start(label: str, ready: dict[str, Any]) -> Start:
    seconds = ready["seconds"]
    return Start(
        label=label,
        weights_s=seconds["weights"] + seconds.get("module and bind", 0.0),
        first_token_s=seconds["first token"],
        imports_s=seconds["python"] + seconds["imports"] + seconds["config and tokenizer"],
        total_s=seconds["total"],
        token_ids=tuple(ready["answer"]["token_ids"]),
        shared_bytes=ready["weights"]["resident_bytes"],
    )


def _daemon(workshop: Workshop, checkpoint: DemoCheckpoint, story: EngineStory) -> Child:
    began = time.monotonic()
    daemon = workshop.weightcached("daemon", "serve", "--model", str(checkpoint.directory), "--name", NAME)
    workshop.wait_ready(daemon, NAME)
    story.daemon_ready_s = time.monotonic() - began
    return daemon


def _over_http(url: str) -> tuple[int, ...]:
    body = {"prompt": PROMPT, "max_new_tokens": NEW_TOKENS}
    return tuple(engine_http.request(url, "POST", "/generate", body)["token_ids"])


def _kill_while_answering(engine: Child, url: str) -> None:
    """Sends a request that takes long, sees that it is being answered, kills the engine, sees that no answer came."""
    connection = engine_http.connect(url)
    try:
        body = {"prompt": PROMPT, "max_new_tokens": LONG_ANSWER_TOKENS}
        engine_http.ask(connection, "POST", "/generate", body)
        deadline = Deadline.after(engine_http.TIMEOUT_S)
        while engine_http.request(url, "GET", "/status")["requests"]["in_flight"] == 0:
            if deadline.passed:
                raise engine.failed("never began to answer")
            time.sleep(_LOOK_AGAIN_S)
        engine.kill()
        try:
            connection.getresponse()
        except (http.client.HTTPException, OSError):
            return
        raise StepFailed("a killed engine has answered: it was not killed in the middle of the request")
    finally:
        connection.close()
