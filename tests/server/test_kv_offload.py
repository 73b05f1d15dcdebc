"""A server with a KV offload is killed, and starts again: prompts find what was computed before."""

from __future__ import annotations

import signal

import pytest

from tests.live import LiveServer
from tests.waiting import wait_until

ENVIRONMENT = {"DRAGOMAN_KV_OFFLOAD_DISK_BYTES": str(1 << 28), "DRAGOMAN_SHOW_CACHED_TOKENS": "1"}
ASK = {"prompt": "Once upon a time there was a dragoman. " * 12, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def asked(live: LiveServer, **fields: object) -> tuple[str, int]:
    """The text and the cached tokens."""
    answer = live.post("/v1/completions", {**ASK, **fields}).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def live(tmp_path):
    made = LiveServer(tmp_path / "var", environment=ENVIRONMENT).start()
    yield made
    made.stop(signal.SIGKILL)


def test_a_restarted_server_goes_on_with_its_blocks(live):
    text, cached = asked(live)
    assert cached == 0
    full = live.metric("vllm:prompt_tokens_total") // 16 * 16
    # The last of the prompt's full blocks is filled with the first token.
    wait_until(lambda: live.metric("dragoman_kv_offload_stored_total", tier="disk") >= full // 16)
    assert live.metric("dragoman_kv_offload_bytes", tier="disk") > 0
    live.stop(signal.SIGKILL)

    live.start()
    again, cached = asked(live)
    assert again == text
    assert full - 16 <= cached <= full
    assert asked(live, cache_salt="another") == (text, 0)
    wait_until(lambda: live.metric("dragoman_kv_offload_hits_total", tier="disk") == cached // 16)
    assert live.metric("vllm:prefix_cache_hits_total") == cached
    for reason in ("damaged", "failures", "late"):
        assert live.metric("dragoman_kv_offload_lost_total", reason=reason) == 0
    (folder,) = (live.data_dir / "kv-offload").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
