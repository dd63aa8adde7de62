"""Which directory a model's name means. The hub, where one is needed, is a small server of our own on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY
from tests.support.weight_directories import make
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.hub import resolve
from weightcached.protocol.index_file import INDEX_NAME

MODEL = "some-org/Model-1.5"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once

INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
NEEDED = {
    "config.json": b"{}",
    INDEX_NAME: INDEX,
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
}
UNNEEDED = {
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"one and two",
    "original/consolidated.safetensors": b"one and two",
    "modeling_custom.py": b"print('run me')",
    "README.md": b"# Model",
}


# A hub


@dataclass
class Hub:
    """A server that knows one model, and what it was asked for."""

    url: str
    asked: list[str] = field(default_factory=list)

    def downloads(self) -> set[str]:
        return {path.rpartition(f"/resolve/{COMMIT}/")[2] for path in self.asked if "/resolve/" in path}


def answer(path: str) -> tuple[int, dict[str, str], bytes]:
    files = {**NEEDED, **UNNEEDED}
    if path == f"/api/models/{MODEL}/revision/main":
        return 200, {}, json.dumps({"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": []}).encode()
    if path == f"/api/models/{MODEL}/tree/{COMMIT}":
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        return 200, {}, json.dumps(entries).encode()
    prefix = f"/{MODEL}/resolve/{COMMIT}/"
    if path.startswith(prefix) and path.removeprefix(prefix) in files:
        data = files[path.removeprefix(prefix)]
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data
    code = "RevisionNotFound" if path.startswith(f"/api/models/{MODEL}/") else "RepoNotFound"
    return 404, {"X-Error-Code": code}, b""


@pytest.fixture
def hub() -> Iterator[Hub]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found.asked.append(path)
            status, headers, body = answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: `asked` says it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@dataclass(frozen=True)
class Home:
    """A hub cache of its own, and the question asked by a process that uses it."""

    path: Path

    @property
    def repository(self) -> Path:
        return self.path / "hub" / ("models--" + MODEL.replace("/", "--"))

    def snapshot(self, files: dict[str, bytes]) -> Path:
        """Lays out what the hub's library would have downloaded: links into a store of blobs."""
        directory = self.repository / "snapshots" / COMMIT
        directory.mkdir(parents=True)
        (self.repository / "blobs").mkdir()
        (self.repository / "refs").mkdir()
        (self.repository / "refs" / "main").write_text(COMMIT)
        for name, data in files.items():
            blob = hashlib.sha1(data).hexdigest()
            (self.repository / "blobs" / blob).write_bytes(data)
            (directory / name).symlink_to(f"../../blobs/{blob}")
        return directory

    def resolve(self, *arguments: str, offline: bool = False, endpoint: str = NOWHERE) -> dict[str, Any]:
        """What ``python -m weightcached.protocol.hub`` prints; a path means exit code 0."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_HOME": str(self.path), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        command = [sys.executable, "-m", "weightcached.protocol.hub", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        document = json.loads(result.stdout)
        assert isinstance(document, dict)
        assert result.returncode == (0 if "path" in document else 1), result.stderr
        return document


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "hub-home")


# Directories


def test_a_directory_is_itself_whatever_it_holds(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_directory_needs_no_hub_library(tmp_path: Path) -> None:
    program = "import sys; from weightcached.protocol.hub import main; main(sys.argv[1:]); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    line, modules = result.stdout.splitlines()
    assert json.loads(line) == {"path": str(tmp_path)}
    assert "huggingface_hub" not in modules.split()


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "./here", "../there", "~/model", "a/b/c", "a//b", "", "-x", "a b"]
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_said_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make(tmp_path / "empty", {}))
    with pytest.raises(InvalidOption):
        resolve(name)


def test_a_file_is_no_model_and_a_directory_has_no_revision(tmp_path: Path) -> None:
    file = make(tmp_path, {"model.safetensors": b""}) / "model.safetensors"
    with pytest.raises(InvalidOption, match="found: a file"):
        resolve(file)
    with pytest.raises(InvalidOption):
        resolve(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["x" * 256, "/" + "x/" * 2500])
def test_a_name_too_long_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(InvalidOption, match="File name too long"):
        resolve(name)


@pytest.mark.root
def test_a_directory_behind_one_that_may_not_be_searched_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "closed" / "model").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)

    def as_nobody() -> None:
        with pytest.raises(InvalidOption, match="Permission denied"):
            resolve(tmp_path / "closed" / "model")

    in_child(as_nobody, uid=NOBODY)


# Hub ids


def test_the_local_cache_answers_without_the_network(home: Home, hub: Hub) -> None:
    snapshot = home.snapshot(NEEDED)
    assert home.resolve(MODEL, offline=True) == {"path": str(snapshot)}
    assert home.resolve(MODEL, "--revision", COMMIT, endpoint=hub.url) == {"path": str(snapshot)}
    assert [path for path in hub.asked if MODEL in path] == []


def test_a_cache_without_the_weights_is_no_answer_when_offline(home: Home) -> None:
    home.snapshot({name: data for name, data in NEEDED.items() if name != "model-2.safetensors"})
    error = home.resolve(MODEL, offline=True)["error"]
    assert error["code"] == "missing_shard"
    assert "model-2.safetensors" in error["found"]


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "hub unreachable"])
def test_an_unknown_model_without_a_network_is_an_error_that_says_what_to_do(home: Home, offline: bool) -> None:
    error = home.resolve(MODEL, offline=offline)["error"]
    assert error["code"] == "checkpoint"
    assert MODEL in error["where"]
    assert error["next_step"]


def test_a_model_is_downloaded_without_what_can_run(home: Home, hub: Hub) -> None:
    path = Path(home.resolve(MODEL, endpoint=hub.url)["path"])
    assert {found.name: found.read_bytes() for found in path.iterdir()} == NEEDED
    assert hub.downloads() == NEEDED.keys()
    hub.asked.clear()
    assert home.resolve(MODEL, endpoint=hub.url) == {"path": str(path)}
    assert [asked for asked in hub.asked if MODEL in asked] == []


def test_the_missing_part_of_a_snapshot_is_downloaded(home: Home, hub: Hub) -> None:
    snapshot = home.snapshot({"config.json": NEEDED["config.json"], INDEX_NAME: INDEX})
    assert home.resolve(MODEL, endpoint=hub.url) == {"path": str(snapshot)}
    assert {found.name for found in snapshot.iterdir()} == NEEDED.keys()


def test_a_snapshot_that_lacks_only_what_weights_do_not_need_is_used_when_the_hub_is_gone(home: Home, hub: Hub) -> None:
    path = Path(home.resolve(MODEL, endpoint=hub.url)["path"])
    (path / "tokenizer.json").unlink()
    assert home.resolve(MODEL, offline=True) == {"path": str(path)}
    assert home.resolve(MODEL) == {"path": str(path)}


@pytest.mark.parametrize("arguments", [["some-org/Other"], [MODEL, "--revision", "no-such-branch"]])
def test_what_the_hub_does_not_know_is_a_bad_option(home: Home, hub: Hub, arguments: list[str]) -> None:
    error = home.resolve(*arguments, endpoint=hub.url)["error"]
    assert error["code"] == "invalid_option"
    assert error["where"].startswith(arguments[0])


def test_a_hub_id_that_the_library_refuses_is_a_bad_option(home: Home) -> None:
    assert home.resolve("some--org/x", offline=True)["error"]["code"] == "invalid_option"
