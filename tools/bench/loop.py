"""Measures how long hostile bodies block the event loop: `python -m tools.bench.loop [--tree FOLDER] [KIND ...]`.

It starts the server of a source tree with a probe on its loop: a task that is due every millisecond. Each kind of body is
sent several times. Columns: the status; the time to the answer; the longest gap of the probe in CPU time of the process
(which other processes do not affect) and in real time; the longest inter-token gap of another stream; and the memory that
was not released. Figures are medians over rounds of the longest value. The first row sends nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from loadtests.server import free_port

ROOT = Path(__file__).resolve().parents[2]
STORY = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}


def many(item: str, count: int) -> str:
    """A JSON list."""
    return "[" + ",".join([item] * count) + "]"


def tensor(data: str, count: int, kind: str = "UINT32", name: str = "input0") -> str:
    """A body of the v2 protocol."""
    one = f'{{"name":"{name}","datatype":"{kind}","shape":[1,{count}],"data":{data}}}'
    return f'{{"inputs":[{one}],"outputs":[{{"name":"output0"}}]}}'


def binary(count: int) -> tuple[bytes, dict[str, str]]:
    """The same with the ids as bytes behind the JSON."""
    head = json.dumps({"inputs": [{"name": "input0", "datatype": "UINT32", "shape": [1, count],
                                   "parameters": {"binary_data_size": 4 * count}}]}).encode()  # fmt: skip
    return head + b"\1\0\0\0" * count, {"inference-header-content-length": str(len(head))}


def zipped(body: str) -> tuple[bytes, dict[str, str]]:
    """Sent compressed."""
    return gzip.compress(body.encode()), {"content-encoding": "gzip"}


MESSAGE = '{"role":"user","content":"a"}'
PART = '{"type":"text","text":"a"}'
TOOL = (
    '{"type":"function","function":{"name":"f%d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}'
)
Body = str | tuple[bytes, dict[str, str]]
KINDS: dict[str, tuple[str, Callable[[], Body]]] = {
    "nothing": ("", lambda: ""),
    "650,000 empty lists": ("/v1/completions", lambda: f'{{"prompt":{many("[]", 650_000)}}}'),
    "650,000 empty lists, unknown field": ("/v1/completions", lambda: f'{{"x":{many("[]", 650_000)},"prompt":"a"}}'),
    "650,000 empty objects": ("/v1/chat/completions", lambda: f'{{"messages":{many("{}", 650_000)}}}'),
    "99,000 empty lists": ("/generate", lambda: f'{{"inputs":"a","x":{many("[]", 99_000)}}}'),
    "940,000 ids, OpenAI": ("/v1/completions", lambda: f'{{"prompt":{many("1", 940_000)}}}'),
    "940,000 ids, embeddings": ("/v1/embeddings", lambda: f'{{"input":{many("1", 940_000)}}}'),
    "940,000 ids, detokenise": ("/detokenize", lambda: f'{{"tokens":{many("1", 940_000)}}}'),
    "940,000 ids, Triton": ("/v2/models/demo/infer", lambda: tensor(many("1", 940_000), 940_000)),
    "470,000 ids, Triton, binary": ("/v2/models/demo/infer", lambda: binary(470_000)),
    "940,000 ids, Triton, gzip": ("/v2/models/demo/infer", lambda: zipped(tensor(many("1", 940_000), 940_000))),
    "470,000 texts, Triton": ("/v2/models/demo/infer", lambda: tensor(many('"a"', 470_000), 470_000, "BYTES", "text_input")),
    "940,000 ids, MindIE": ("mindie/v1/completions", lambda: f'{{"model":"demo","prompt":{many("1", 940_000)}}}'),
    "940,000 ids, MindIE's own": ("mindie/infer_token", lambda: f'{{"input_id":{many("1", 940_000)}}}'),
    "940,000 ids, MindIE's Triton": ("mindie/v2/models/demo/infer", lambda: tensor(many("1", 940_000), 940_000)),
    "48,000 messages": ("/v1/chat/completions", lambda: f'{{"messages":{many(MESSAGE, 48_000)}}}'),
    "48,000 messages, TGI": ("/chat_tokenize", lambda: f'{{"messages":{many(MESSAGE, 48_000)}}}'),
    "48,000 messages, MindIE": ("mindie/v1/chat/completions", lambda: f'{{"model":"demo","messages":{many(MESSAGE, 48_000)}}}'),
    "70,000 content parts": ("/v1/chat/completions", lambda: f'{{"messages":[{{"role":"user","content":{many(PART, 70_000)}}}]}}'),
    "480,000 stop strings": ("/v1/completions", lambda: f'{{"prompt":"a","stop":{many(chr(34) + "a" + chr(34), 480_000)}}}'),
    "170,000 logit_bias": ("/v1/completions", lambda: '{"prompt":"a","logit_bias":{' + ",".join(f'"{i}":1' for i in range(170_000)) + "}}"),
    "800,000 allowed ids": ("/v1/completions", lambda: f'{{"prompt":"a","allowed_token_ids":{many("1", 800_000)}}}'),
    "15,000 tools": ("/v1/chat/completions", lambda: f'{{"messages":[{MESSAGE}],"tools":[{",".join(TOOL % i for i in range(15_000))}]}}'),
    "100 levels x 900": ("/v1/completions", lambda: f'{{"x":{many("[" * 100 + "]" * 100, 900)},"prompt":"a"}}'),
    "900,000 levels": ("/v1/completions", lambda: '{"x":' + "[" * 900_000 + "]" * 900_000 + "}"),
    "a text of escapes": ("/v1/completions", lambda: '{"prompt":"' + "\\n" * 900_000 + '"}'),
    "a text of 1.9 MB": ("/v1/completions", lambda: json.dumps({"prompt": "a b " * 470_000})),
    "a text of 1.9 MB, cut": ("/v1/completions", lambda: json.dumps({"prompt": "a b " * 470_000, "truncate_prompt_tokens": 9, "max_tokens": 1})),
    "a word of 1.9 MB": ("/generate", lambda: json.dumps({"inputs": "a" * 1_900_000})),
    "a text of 1.9 MB, chat": ("/v1/chat/completions", lambda: json.dumps({"messages": [{"role": "user", "content": "a b " * 470_000}]})),
    "a text of 1.9 MB, tokenised": ("/tokenize", lambda: json.dumps({"inputs": "a b " * 470_000})),
    "1.9 MB of digits": ("/v1/completions", lambda: '{"prompt":"a","seed":' + "1" * 1_900_000 + "}"),
    "170,000 keys": ("/v1/completions", lambda: "{" + ",".join(f'"k{i}":1' for i in range(170_000)) + "}"),
    "170,000 parameters, Triton": ("/v2/models/demo/generate", lambda: '{"text_input":"a",' + ",".join(f'"k{i}":1' for i in range(160_000)) + "}"),
    "170,000 keys, demo server": ("/generate", lambda: '{"prompt":"a",' + ",".join(f'"k{i}":1' for i in range(160_000)) + "}"),
    "490 headers": ("/v1/completions", lambda: (b'{"prompt":"a","max_tokens":1}', {f"x-{i}": "y" * 20 for i in range(400)})),
    "128 sequences with 20 logprobs": ("/v1/completions", lambda: json.dumps({"prompt": "a", "n": 128, "max_tokens": 60, "logprobs": 20, "temperature": 1, "ignore_eos": True})),
    "1,900 prompt logprobs": ("/v1/completions", lambda: json.dumps({"prompt": [5] * 1900, "prompt_logprobs": 20, "max_tokens": 1})),
}  # fmt: skip


PROBE = """
import asyncio, json, os, resource, sys, time
sys.argv = ["manage.py", "serve"]
sys.path.insert(0, os.getcwd())
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"

class Probe(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport, self.cpu, self.clock = transport, 0.0, 0.0
        self.task = asyncio.get_running_loop().create_task(self.run())
    def datagram_received(self, data, address):
        self.transport.sendto(json.dumps([self.cpu, self.clock]).encode(), address)
        self.cpu = self.clock = 0.0
    async def run(self):
        while True:
            cpu, clock = time.process_time(), time.perf_counter()
            await asyncio.sleep(0.001)
            self.cpu = max(self.cpu, time.process_time() - cpu)
            self.clock = max(self.clock, time.perf_counter() - clock)

from django.core.management import execute_from_command_line
from inference.server import plane_server
import django
django.setup()
from config import server
original = server.Server._start
async def start(self):
    port = int(os.environ["PROBE_PORT"])
    await asyncio.get_running_loop().create_datagram_endpoint(Probe, local_addr=("127.0.0.1", port))
    await original(self)
server.Server._start = start
execute_from_command_line(sys.argv)
"""


async def story(url: str, gaps: list[float]) -> None:
    """A neighbour's stream, begun again whenever it ends."""
    async with httpx.AsyncClient(timeout=120) as client:
        while True:
            last = None
            async with client.stream("POST", f"{url}/v1/completions", json=STORY) as answer:
                async for _ in answer.aiter_raw():
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


def asked(probe: socket.socket) -> tuple[float, float]:
    """The longest gaps since the last question, in milliseconds: CPU time, and by the clock."""
    probe.send(b"?")
    cpu, clock = json.loads(probe.recv(200))
    return cpu * 1e3, clock * 1e3


@contextlib.contextmanager
def probed_server(tree: str) -> Iterator[tuple[str, str, socket.socket, psutil.Process]]:
    """The URLs of its front and MindIE planes, its probe, and the process."""
    front, mindie, probe = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="dragoman-loop-") as folder:
        settings = {"DATA_DIR": folder, "FRONT_PORT": front, "CONTROL_PORT": front, "MINDIE_PORT": mindie, "THREADS": 1,
                    "MINDIE_MANAGEMENT_PORT": 0, "MINDIE_METRICS_PORT": 0, "GRPC_PORT": 0, "DJL_PORT": 0, "TORCHSERVE_GRPC_INFERENCE_PORT": 0,
                    "TORCHSERVE_GRPC_MANAGEMENT_PORT": 0}  # fmt: skip
        environment = {**os.environ, **{f"DRAGOMAN_{name}": str(value) for name, value in settings.items()}}
        environment["PROBE_PORT"] = str(probe)
        with Path(folder, "log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-c", PROBE]
            process = subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{front}"
            while True:
                if process.poll() is not None:
                    raise RuntimeError(Path(folder, "log").read_text())
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.2)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as questions:
                questions.settimeout(120)
                questions.connect(("127.0.0.1", probe))
                yield url, f"http://127.0.0.1:{mindie}", questions, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(90)


async def main() -> int:
    """One row after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", default=str(ROOT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("kinds", nargs="*")
    options = parser.parse_args()
    with probed_server(options.tree) as (url, mindie, probe, process):
        heads = ("status", "answer ms", "cpu gap", "clock gap", "stream gap", "kept MiB")
        print(f"{'kind':36}" + "".join(f"{head:>11}" for head in heads))
        for kind, (path, make) in KINDS.items():
            if not options.kinds or kind in options.kinds:
                await row(
                    kind,
                    path.replace("mindie", mindie, 1) if path[:1] == "m" else url + path,
                    make(),
                    url,
                    probe,
                    process,
                    options.rounds,
                )
    return 0


async def row(
    kind: str, target: str, made: Body, url: str, probe: socket.socket, process: psutil.Process, rounds: int
) -> None:
    """Measure one kind."""
    body, headers = (made.encode(), {}) if isinstance(made, str) else made
    gaps: list[float] = []
    neighbour = asyncio.create_task(story(url, gaps))
    await asyncio.sleep(0.5)
    before, seen = process.memory_info().rss, []
    for _ in range(rounds):
        gaps.clear()
        asked(probe)
        status, took = await (send(target, body, headers) if body else wait())
        await asyncio.sleep(0.1)
        seen.append((took * 1e3, *await asyncio.to_thread(asked, probe), max(gaps, default=0.0) * 1e3))
    neighbour.cancel()
    await asyncio.gather(neighbour, return_exceptions=True)
    figures = [statistics.median(column) for column in zip(*seen, strict=True)]
    kept = (process.memory_info().rss - before) / (1 << 20)
    print(f"{kind:36}{status:11}" + "".join(f"{figure:11.0f}" for figure in (*figures, kept)), flush=True)


async def send(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, float]:
    """In a process of its own, so that preparing it holds up no neighbour here."""
    parts = urlsplit(url)
    code = (
        "import sys,time,http.client as c,json;h=json.loads(sys.argv[4]);b=sys.stdin.buffer.read();"
        "k=c.HTTPConnection(sys.argv[1],int(sys.argv[2]),timeout=120);t=time.perf_counter();"
        "k.request('POST',sys.argv[3],b,h);r=k.getresponse();r.read();print(r.status,time.perf_counter()-t)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", code, str(parts.hostname), str(parts.port), parts.path, json.dumps(headers), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )  # fmt: skip
    output, _ = await process.communicate(body)
    status, took = output.split()
    return int(status), float(took)


async def wait() -> tuple[int, float]:
    """Nothing, for as long."""
    await asyncio.sleep(0.5)
    return 0, 0.0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
