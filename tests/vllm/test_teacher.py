"""A real server: vLLM's own, with a small model and its tool parser on, as the teacher over HTTP on loopback."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import sample
from rl import tasks
from rl.chat import QwenChat


@pytest.fixture
def server(folders, tmp_path):
    """(url, tokenizer) of a server that samples from a random Qwen3; ended with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The API server talks to an engine in a process of its own, which the tests' environment else forbids
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders["qwen3"]), "--host",
               "127.0.0.1", "--port", str(port), "--served-model-name", "small", "--dtype", "bfloat16",
               "--enforce-eager",
               "--max-model-len", "4096", "--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser",
               "hermes", "--enable-prompt-tokens-details", "--api-key", "a-key-of-ours"]
    with open(tmp_path / "server.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 900  # it takes half a minute, and much longer beside other work
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    pytest.fail((tmp_path / "server.log").read_text()[-3000:])
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", QwenChat(folders["qwen3"]).tokenizer
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the engine's processes too, which would outlive the server
        process.wait()


@pytest.mark.timeout(1200)
def test_a_handful_of_tasks_over_http(server, tmp_path, monkeypatch):
    url, tokenizer = server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "SETS", {"eval": {"L1": 1}, "rl": {"L1": 1}})
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-ours")
    # A random model calls no tool by itself: the server is told to have it call one, and its grammar to come to an end
    closing = {str(i): 30 for i in (tokenizer.convert_tokens_to_ids(text) for text in ('"', "}", "]", "},", '"}', "]}"))
               if i is not None}
    extra = {"tool_choice": "required", "seed": 1, "logit_bias": closing}

    def collect(file, **settings):
        changes = {"teacher_model": "small", "teacher_url": url, "teacher_requests": 4, "max_tokens": 4000,
                   "max_turn_tokens": 60, "max_turns": 3, "teacher_retries": 1, **settings}
        assert sample.main(["--collect", file, "--policy", "api", "--tasks", "distill:L1=5", "--config", "l8.py",
                            *(f"--{key}={value}" for key, value in changes.items())]) == 0
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        manifest = json.loads((tmp_path / file.replace(".jsonl", ".manifest.json")).read_text())
        assert [row["id"] for row in rows] == [f"L1-distill-{i}" for i in range(5)]
        assert manifest["errors"] == {} and manifest["requests"] == sum(row["turns"] for row in rows)
        used = [row["tokens"] for row in rows]
        assert all(tokens["output"] > 0 and tokens["uncached"] + tokens["cached"] > 1000 for tokens in used)
        return rows

    plain = collect("plain.jsonl")
    assert {row["ending"] for row in plain} <= {"length", "no answer", "answer", "turns"}
    forced = collect("forced.jsonl", teacher_extra=json.dumps(extra))
    calls = [message for row in forced for message in row["messages"] if message.get("tool_calls")]
    answers = [message["content"] for row in forced for message in row["messages"] if message["role"] == "tool"]
    assert calls and any(text.startswith(("Path found", "Error", "No path")) for text in answers)
    assert any(row["turns"] > 1 for row in forced)  # the server took its own calls and our answers back
