"""A deployment gets another version of its model, with other weights and other token ids, while streams run."""

from __future__ import annotations

import json
import threading
from collections import Counter

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests import calls
from tests.cluster import Cluster
from tests.shifted import shifted
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
"""Workers load a real model, several times, on whatever the machine has left."""

ASK = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.8, "seed": 5}
REQUESTS = [
    ("/v1/completions", {"prompt": "Once upon a time there was", **ASK, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me of Rome."}], **ASK, "stream": True}),
    ("/v1/completions", {"prompt": "The capital of France", **ASK, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], **ASK, "max_tokens": 4}),
]


def second_version(folder):
    """The demo model with other token ids, and less sure of itself."""
    new = shifted(folder)
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    moved = embeddings.clone()
    for old, row in new.items():
        moved[row] = embeddings[old]
    weights["model.embed_tokens.weight"] = moved
    weights["model.norm.weight"] *= 0.75
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def text_of(answer: httpx.Response) -> str:
    """The text of a complete answer, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return said(answer.json())
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", answer.text[-300:]
    return "".join(said(json.loads(event)) for event in events[:-1])


def said(body) -> str:
    (choice,) = body["choices"]
    return choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))["content"] or ""


def ask(url: str, model: str, number: int) -> str:
    path, body = REQUESTS[number]
    answer = calls.post(f"{url}{path}", json={"model": model, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return text_of(answer)


class Askers:
    """Two threads for each request, which ask it again and again."""

    def __init__(self, url: str, model: str) -> None:
        self.texts = [Counter() for _ in REQUESTS]
        self.errors = []
        self._url, self._model = url, model
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n % len(REQUESTS),)) for n in range(2 * len(REQUESTS))
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Wait until each request has been answered so many times more."""
        goals = [texts.total() + count for texts in self.texts]
        wait_until(
            lambda: self.errors or all(t.total() >= goal for t, goal in zip(self.texts, goals, strict=True)),
            180,
            lambda: self.texts,
        )

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self.texts[number][ask(self._url, self._model, number)] += 1
            except Exception as error:  # whatever it is, the test reports it
                self.errors.append(repr(error))


def test_another_version_of_the_model_loses_no_request_and_mixes_no_text(tmp_path):
    cluster = Cluster(tmp_path / "var")
    source = second_version(tmp_path / "second")
    try:
        cluster.start("reconcile")
        wait_until(lambda: "this reconciler leads" in cluster.log, 60, lambda: cluster.log)
        cluster.start_web()
        cluster.deploy("upgrades", "--max-workers", "2")
        cluster.run("scale", "upgrades", "2", "--wait", "120")
        before = [ask(cluster.url, "upgrades", number) for number in range(len(REQUESTS))]
        old = {worker["process_id"] for worker in cluster.deployment("upgrades")["workers"]}
        with Askers(cluster.url, "upgrades") as askers:
            askers.more(3)
            register = f"from management.services.models import register_model; register_model('demo', {str(source)!r}, 'test')"
            cluster.run("shell", "-c", register)
            cluster.run("change", "upgrades", "--model-version", "2")

            def replaced() -> bool:
                workers = cluster.deployment("upgrades")["workers"]
                new = not old & {worker["process_id"] for worker in workers}
                return askers.errors or (new and [worker["state"] for worker in workers] == ["ready", "ready"])

            wait_until(replaced, 240, lambda: f"{json.dumps(cluster.status())} {askers.errors}", every_s=1)
            askers.more(3)
        after = [ask(cluster.url, "upgrades", number) for number in range(len(REQUESTS))]
        assert askers.errors == []
        assert before != after
        for texts, one, other in zip(askers.texts, before, after, strict=True):
            assert set(texts) == {one, other}
    finally:
        cluster.stop()
