"""Adapters over HTTP: by name in every dialect, in one batch with the base model, replaced and removed while serving."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.client import EngineClient
from engine.messages import AdapterRef
from tests.live import LiveServer, wait_until

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


def test_the_registry_decides_what_is_read_ahead_and_pinned(tmp_path):
    """A worker refuses to pin what it has not read; so that tells whether it has."""
    live = LiveServer(tmp_path / "var").start()
    database = sqlite3.connect(live.data_dir / "dragoman.sqlite3", timeout=10)

    def column(query: str) -> list[tuple]:
        return database.execute(query).fetchall()

    refs = {
        name: AdapterRef(d, source) for name, d, source in column("select name, digest, source from management_adapter")
    }
    ((path, epoch),) = column("select socket, epoch from management_worker where state = 'ready'")

    async def ask(name: str, action: str) -> str | None:
        client = EngineClient(path, "demo/0", epoch)
        await client.connect()
        try:
            return await client.command(action, refs[name])
        finally:
            await client.close()

    def wish(**fields: int) -> None:
        for name, value in fields.items():
            database.execute(f"update management_adapter set {name} = ?", (value,))
        database.commit()

    assert asyncio.run(ask("json", "unpin")) == asyncio.run(ask("pirate", "unpin")) == "the adapter is not loaded"
    wish(preload=1)
    wait_until(lambda: all(asyncio.run(ask(name, "unpin")) is None for name in refs), 20, lambda: live.log)
    assert answer(live, "json").startswith("{")
    database.execute("delete from management_adapter where name = 'json'")
    database.commit()
    wait_until(lambda: asyncio.run(ask("json", "unpin")) == "the adapter is not loaded", 20, lambda: live.log)
    assert live.get("/v1/models/json").status_code == 404
    assert answer(live, "pirate")
    database.close()
    assert live.stop() == 0, live.log
