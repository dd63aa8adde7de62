"""The engine's HTTP, over real connections to a server in this process."""

import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.recipes import recipe_of
from weightcached.client.engine import model as engine_model
from weightcached.client.engine.server import BODY_MAX_BYTES, TEXTS_MAX, EngineServer
from weightcached.client.engine.service import Service
from weightcached.protocol.errors import DeploymentError

Answer = tuple[int, dict[str, Any]]


def served(directory: Path) -> Iterator[EngineServer]:
    recipe = recipe_of(directory)
    service = Service(recipe, engine_model.load(recipe, None, dtype="auto"), None, mode="off")
    server = EngineServer(service, port=0, start_seconds={"total": 1.5})
    server.start()
    yield server
    assert server.stop(timeout_s=30)


@pytest.fixture(scope="module")
def decoder(tiny: Path) -> Iterator[EngineServer]:
    yield from served(tiny)


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Iterator[EngineServer]:
    yield from served(minilm)


def ask(server: EngineServer, method: str, path: str, body: object = None, *, raw: bytes | None = None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request(method, path, body=data)
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def speak(server: EngineServer, sent: bytes, *, shut: bool = False) -> bytes:
    """All that the server answers to bytes that no HTTP library would send."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.sendall(sent)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received


def test_it_listens_on_loopback_only(decoder: EngineServer) -> None:
    assert urlsplit(decoder.url).hostname == "127.0.0.1"


def test_healthz_and_status(decoder: EngineServer, tiny: Path) -> None:
    assert ask(decoder, "GET", "/healthz") == (200, {"status": "ok"})
    status, body = ask(decoder, "GET", "/status")
    assert status == 200
    assert body["model"] == str(tiny)
    assert (body["architecture"], body["kind"], body["dtype"]) == ("LlamaForCausalLM", "decoder", "bfloat16")
    assert body["weights"]["source"] == "transformers"
    assert body["weights"]["lease"] is None
    assert body["start_seconds"] == {"total": 1.5}


def test_generation_is_deterministic_and_bounded(decoder: EngineServer) -> None:
    answers = [ask(decoder, "POST", "/generate", {"prompt": "Weights stay", "max_new_tokens": 5})[1] for _ in range(2)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert 1 <= len(answers[0]["token_ids"]) <= 5
    assert answers[0]["prompt_tokens"] > 0
    assert 0 < answers[0]["first_token_s"] <= answers[0]["seconds"]
    assert answers[0]["finish_reason"] in ("length", "stop")


def test_answers_made_at_once_are_those_made_alone(decoder: EngineServer) -> None:
    prompts = ["one", "two words", "three more words", "and a fourth"]
    alone = [ask(decoder, "POST", "/generate", {"prompt": p, "max_new_tokens": 8})[1]["token_ids"] for p in prompts]
    together: dict[str, list[int]] = {}

    def one(prompt: str) -> None:
        together[prompt] = ask(decoder, "POST", "/generate", {"prompt": prompt, "max_new_tokens": 8})[1]["token_ids"]

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[prompt] for prompt in prompts] == alone
    assert ask(decoder, "GET", "/status")[1]["requests"]["in_flight"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "max_new_tokens": "5"}, "max_new_tokens"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "x", "max_new_tokens": True}, "max_new_tokens"),
        ({"prompt": "x", "temperature": 1.0}, "temperature"),
        (["prompt"], "body"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "x", "max_new_tokens": 4096}, "context of 256"),
    ],
)
def test_a_bad_request_says_what_is_wrong(decoder: EngineServer, body: object, says: str) -> None:
    status, answer = ask(decoder, "POST", "/generate", body)
    assert status == 400
    assert says in answer["error"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"null", b"[" * 5000])
def test_what_is_not_json_is_refused(decoder: EngineServer, raw: bytes) -> None:
    assert ask(decoder, "POST", "/generate", raw=raw)[0] == 400


def test_a_body_over_the_limit_is_refused_and_the_refusal_arrives(decoder: EngineServer) -> None:
    raw = json.dumps({"prompt": "x" * BODY_MAX_BYTES}).encode()
    status, answer = ask(decoder, "POST", "/generate", raw=raw)
    assert status == 413
    assert str(BODY_MAX_BYTES) in answer["error"]


@pytest.mark.parametrize(
    "header", [b"", b"Content-Length: -1\r\n", b"Content-Length: 1_0\r\n", b"Content-Length: x\r\n"]
)
def test_a_length_is_needed(decoder: EngineServer, header: bytes) -> None:
    assert b" 411 " in speak(decoder, b"POST /generate HTTP/1.1\r\n" + header + b"\r\n").splitlines()[0]


def test_a_body_that_ends_early_is_refused(decoder: EngineServer) -> None:
    answer = speak(decoder, b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", shut=True)
    assert b" 400 " in answer.splitlines()[0]
    assert b"1 of 100 bytes" in answer


@pytest.mark.parametrize("line", [b"BREW /pot HTTP/1.1", b"GET", b"GET / HTTP/9.9", b"GET " + b"x" * 70000])
def test_what_is_not_http_is_refused_in_json(decoder: EngineServer, line: bytes) -> None:
    answer = speak(decoder, line + b"\r\n\r\n")
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/nowhere", 404), ("GET", "/generate", 405), ("POST", "/status", 405)],
)
def test_unknown_paths_and_methods(decoder: EngineServer, method: str, path: str, status: int) -> None:
    found, answer = ask(decoder, method, path, {} if method == "POST" else None)
    assert found == status
    assert "error" in answer


def test_a_decoder_has_no_embeddings_and_an_encoder_no_text(decoder: EngineServer, encoder: EngineServer) -> None:
    assert ask(decoder, "POST", "/embed", {"texts": ["x"]})[0] == 409
    assert ask(encoder, "POST", "/generate", {"prompt": "x"})[0] == 409


def test_embeddings_have_length_one_and_mean_something(encoder: EngineServer) -> None:
    texts = ["The engine restarted quickly.", "The server came back fast.", "Bread needs flour and salt."]
    status, answer = ask(encoder, "POST", "/embed", {"texts": texts})
    vectors = answer["embeddings"]
    assert status == 200
    assert [len(vector) for vector in vectors] == [384] * 3
    for vector in vectors:
        assert math.fsum(x * x for x in vector) == pytest.approx(1.0, abs=1e-5)

    def like(a: int, b: int) -> float:
        return math.fsum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))

    assert like(0, 1) > 0.4 > like(0, 2)


def test_an_embedding_does_not_depend_on_its_company_by_more_than_rounding(encoder: EngineServer) -> None:
    """A padded text must not let its padding in."""
    alone = ask(encoder, "POST", "/embed", {"texts": ["short"]})[1]["embeddings"][0]
    padded = ask(encoder, "POST", "/embed", {"texts": ["short", "a much longer text " * 10]})[1]["embeddings"][0]
    assert max(abs(a - b) for a, b in zip(alone, padded, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("texts", "says"),
    [([], "texts"), (["x"] * (TEXTS_MAX + 1), "texts"), ([5], "texts"), (["word " * 600], "tokens")],
)
def test_bad_texts_are_refused(encoder: EngineServer, texts: list[Any], says: str) -> None:
    status, answer = ask(encoder, "POST", "/embed", {"texts": texts})
    assert status == 400
    assert says in answer["error"]


def test_a_port_that_is_taken_is_said(decoder: EngineServer, tiny: Path) -> None:
    port = urlsplit(decoder.url).port
    assert port is not None
    with pytest.raises(DeploymentError) as caught:
        EngineServer(None, port=port, start_seconds={})  # type: ignore[arg-type]  # it fails before it needs one
    assert str(port) in str(caught.value.where)


def test_stopping_finishes_what_is_under_way_and_does_not_wait_for_the_idle(tiny: Path) -> None:
    server = next(generator := served(tiny))
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port)) as idle:
        answers: list[Answer] = []
        body = {"prompt": "a long answer", "max_new_tokens": 200}
        asking = threading.Thread(target=lambda: answers.append(ask(server, "POST", "/generate", body)))
        asking.start()
        while ask(server, "GET", "/status")[1]["requests"]["in_flight"] == 0:
            assert asking.is_alive()
        assert list(generator) == []  # stops
        asking.join(60)
        assert answers[0][0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(server, "GET", "/healthz")
        idle.close()
