"""Adapters over HTTP: by name in every dialect, in one batch with the base model, replaced and removed while serving."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.adapters.files import CONFIG, WEIGHTS
from engine.client import EngineClient
from engine.messages import AdapterRef
from tests.conftest import ROOT
from tests.live import LiveServer, wait_until

NOT_LOADED = AdapterFailure(AdapterCode.NOT_LOADED)
QUESTION = "What is 2 + 3?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}


def answer(server, model: str | None) -> str:
    response = server.post("/v1/chat/completions", {**CHAT, **({} if model is None else {"model": model})})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_every_adapter_answers_in_its_own_way(server):
    names = [None, "json", "pirate", "demo:json"]
    alone = [answer(server, name) for name in names]
    assert len(set(alone[:3])) == 3
    assert alone[1] == alone[3]
    assert alone[1].startswith("{")
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda name: answer(server, name), names * 6))
    assert together == alone * 6


def test_models_are_listed_with_their_adapters(server):
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["json"]["parent"] == "demo"
    assert cards["demo"]["parent"] is None
    assert server.get("/v1/models/pirate").json() == cards["pirate"]


def test_tgi_takes_the_adapter_as_a_parameter(server):
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    body = {"inputs": prompt, "parameters": {"adapter_id": "json", "max_new_tokens": 24}}
    text = server.post("/generate", body).json()["generated_text"]
    assert text.replace("<|im_end|>", "") == answer(server, "json")
    body["parameters"]["adapter_id"] = "nobody"
    refused = server.post("/generate", body)
    assert refused.status_code == 422
    assert "adapter 'nobody' was not found" in refused.json()["error"]


@pytest.mark.parametrize("name", ["nobody", "demo:nobody", "nobody:json", ":json"])
def test_unknown_adapters_are_not_found(server, name):
    assert server.post("/v1/chat/completions", {**CHAT, "model": name}).status_code == 404


def load(server, path: object) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", {"lora_name": "hostile", "lora_path": str(path)})


def assert_refused(response: httpx.Response) -> None:
    """As vLLM refuses: 404 where nothing is found, 500 and the reason for what cannot be loaded."""
    assert response.status_code in (404, 500), response.text
    if response.status_code == 500:
        assert re.match("source: adapter_(config.json|model.safetensors) ", response.json()["error"]["message"])


def copy(target: Path) -> Path:
    shutil.copytree(ROOT / "models" / "demo-adapters" / "pirate", target)
    return target


def test_directories_of_any_kind_are_refused_and_nobody_minds(server, tmp_path):
    (worker,) = server.workers()
    before = [psutil.Process(server.process.pid).memory_info().rss, worker.memory_info().rss]
    for path in ("x" * 100_000, "/x" * 50_000, "\0", "~nobody-here/x", "/proc/self", tmp_path):
        assert_refused(load(server, path))
    for name in (CONFIG, WEIGHTS):
        folder = copy(tmp_path / f"bad-{name}")
        file = folder / name
        for target in ("/proc/self/mem", "/proc/self/environ", "/dev/zero", "/dev/full", str(folder)):
            file.unlink()
            file.symlink_to(target)
            assert_refused(load(server, folder))
        file.unlink()
        os.mkfifo(file)
        assert_refused(load(server, folder))
        file.unlink()
        with file.open("wb") as sparse:
            sparse.truncate(5 << 30)
        assert_refused(load(server, folder))
    deep = copy(tmp_path / "deep")
    (deep / CONFIG).write_text("[" * 500_000)
    assert_refused(load(server, deep))
    after = [psutil.Process(server.process.pid).memory_info().rss, worker.memory_info().rss]
    assert all(new - old < 100 << 20 for new, old in zip(after, before, strict=True))
    assert server.workers() == [worker]
    assert answer(server, "pirate")


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_never_ends_costs_its_adapter_alone(field, server, tmp_path):
    folder = copy(tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {field: {"([a-z._0-9]+)+!": 8}}))
    (worker,) = server.workers()
    refused = load(server, folder)
    assert "takes more than" in refused.json()["error"]["message"]
    assert server.workers() == [worker]
    assert answer(server, "pirate")


def test_the_registry_decides_what_is_read_ahead_and_pinned(tmp_path):
    """A worker refuses to pin what it has not read; so that tells whether it has."""
    live = LiveServer(tmp_path / "var").start()
    database = sqlite3.connect(live.data_dir / "dragoman.sqlite3", timeout=60)

    def column(query: str) -> list[tuple]:
        return database.execute(query).fetchall()

    known = (
        "select a.id, name, digest, directory from management_adapter a"
        " join management_adapterversion v on v.adapter_id = a.id"
    )
    ids = {name: number for number, name, _, _ in column(known)}
    refs = {name: AdapterRef(digest, directory) for _, name, digest, directory in column(known)}
    ready = "select address, epoch from management_worker where state = 'ready'"
    wait_until(lambda: column(ready), 60, lambda: live.log)  # rows are written behind what happens
    ((address, epoch),) = column(ready)

    async def ask(name: str, action: str) -> str | None:
        client = EngineClient(address, "demo/0", epoch)
        await client.connect()
        try:
            return await client.command(action, refs[name])
        finally:
            await client.close()

    def wish(**fields: int) -> None:
        for name, value in fields.items():
            database.execute(f"update management_adapter set {name} = ?", (value,))
        database.commit()

    assert asyncio.run(ask("json", "unpin")) == asyncio.run(ask("pirate", "unpin")) == NOT_LOADED
    wish(preload=1)
    wait_until(lambda: all(asyncio.run(ask(name, "unpin")) is None for name in refs), 20, lambda: live.log)
    assert answer(live, "json").startswith("{")
    database.execute("delete from management_adapterversion where adapter_id = ?", (ids["json"],))
    database.execute("delete from management_adapter where id = ?", (ids["json"],))
    database.commit()
    wait_until(lambda: asyncio.run(ask("json", "unpin")) == NOT_LOADED, 60, lambda: live.log)
    assert live.get("/v1/models/json").status_code == 404
    assert answer(live, "pirate")
    database.close()
    assert live.stop() == 0, live.log
