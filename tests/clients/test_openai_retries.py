"""The released openai package obeys what refusals say: when to come again, and when not to."""

from __future__ import annotations

import pytest

from tests.live import LiveServer
from tests.server.test_keys import create_key

PROGRAM = """
    import httpx2, openai
    seen = []
    def note(response):
        seen.append((response.status_code, response.headers.get("retry-after-ms"), response.headers.get("x-should-retry")))
    def client(key, retries):
        http = httpx2.Client(event_hooks={"response": [note]})
        return openai.OpenAI(base_url=URL + "/v1", api_key=key, max_retries=retries, http_client=http)
    def ask(client):
        return client.completions.create(model="demo", prompt="Once", max_tokens=1, extra_headers=HEADERS)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    live = LiveServer(
        tmp_path_factory.mktemp("limits") / "var", environment={"DRAGOMAN_REQUIRE_API_KEY": "true"}
    ).start()
    yield live
    assert live.stop() == 0


def test_it_comes_again_when_the_rate_allows_it(server, run_client):
    key = create_key(server, "--requests-per-minute", "30")
    printed = run_client(
        f"\n    HEADERS = {{}}{PROGRAM}"
        f"""
    impatient = client({key!r}, 0)
    try:
        for _ in range(1000):
            ask(impatient)
    except openai.RateLimitError as error:
        assert error.response.headers["x-ratelimit-limit-requests"] == "30"
        assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    else:
        raise AssertionError("never limited")
    seen.clear()
    assert ask(client({key!r}, 2)).usage.completion_tokens == 1
    print(seen)
    assert seen[-1][0] == 200 and [s for s, *_ in seen[:-1]] == [429] * (len(seen) - 1), seen
    assert all(1000 <= int(ms) <= 2001 for _, ms, _ in seen[:-1]), seen
    """,
    )
    assert "200" in printed


def test_it_does_not_come_again_when_the_day_is_over(server, run_client):
    key = create_key(server, "--tokens-per-day", "1")
    run_client(
        f"\n    HEADERS = {{}}{PROGRAM}"
        f"""
    ask(client({key!r}, 0))
    seen.clear()
    try:
        ask(client({key!r}, 5))
    except openai.RateLimitError:
        assert [(status, retry) for status, _, retry in seen] == [(429, "false")], seen
    else:
        raise AssertionError("not limited")
    """,
    )


def test_a_repetition_under_one_key_is_the_same_answer(server, run_client):
    key = create_key(server)
    run_client(
        f"\n    HEADERS = {{'Idempotency-Key': 'a'}}{PROGRAM}"
        f"""
    patient = client({key!r}, 2)
    assert ask(patient).id == ask(patient).id
    """,
    )
