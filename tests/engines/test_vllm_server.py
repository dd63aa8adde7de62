"""`weightcached launch` with vLLM's own server, as an operator types it, until it answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from tests.engines.engine import PYTHON
from tests.engines.generating import serving
from weightcached.client.demo.checkpoint import make_checkpoint

START_TIMEOUT_S = 400.0


@pytest.mark.timeout(600)
def test_the_server_answers_with_weights_from_the_daemon_and_ends_when_told_to(tmp_path):
    model = make_checkpoint(tmp_path / "model", nbytes=8 << 20).directory
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [PYTHON.parent / "weightcached", "launch", "--weight-cache-mode", "require"]
    command += ["--runtime-dir", tmp_path / "run", "--", PYTHON.parent / "vllm", "serve", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "64", "--served-model-name", "m"]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "WEIGHTCACHED_CACHE_DIR": str(tmp_path / "run" / "digests"),
    }
    with serving(model, tmp_path / "run") as (daemon,), open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            _wait_healthy(server, port, tmp_path / "log")
            answer = _post(port, {"model": "m", "prompt": "What memcached is", "max_tokens": 4, "temperature": 0})
            assert answer["usage"]["completion_tokens"] == 4
            assert daemon.report().lease_count == 1
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            server.kill()
            server.wait()
        assert "source daemon" in (tmp_path / "log").read_text()


def _wait_healthy(server, port, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def _post(port, request):
    data = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as response:
        return json.load(response)
