"""The released openai package, unmodified."""

from __future__ import annotations

import pytest

from tests.engine.test_embeddings import encoder
from tests.live import LiveServer


@pytest.mark.smoke
def test_chat_completions_models_and_errors(run_client):
    run_client("""
        import openai
        client = openai.OpenAI(base_url=URL + "/v1", api_key="anything", max_retries=0)
        ask = dict(model="demo", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0)
        whole = client.chat.completions.create(**ask)
        assert whole.choices[0].message.content == "The capital of France is Paris.", whole
        assert whole._request_id
        parts, usage = [], None
        for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            parts += [c.delta.content or "" for c in chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content
        assert usage.completion_tokens == whole.usage.completion_tokens

        done = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, logprobs=2, seed=1)
        assert len(done.choices[0].logprobs.tokens) == 8
        streamed = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, seed=1, stream=True)
        assert "".join(c.choices[0].text for c in streamed) == done.choices[0].text

        assert [m.id for m in client.models.list()] == ["demo", "json", "pirate"]
        assert client.models.retrieve("demo").id == "demo"
        for call, error in [
            (lambda: client.chat.completions.create(**{**ask, "model": "nobody"}), openai.NotFoundError),
            (lambda: client.chat.completions.create(**ask, top_p=7), openai.BadRequestError),
            (lambda: client.models.retrieve("org/nobody"), openai.NotFoundError),
        ]:
            try:
                call()
            except error as e:
                assert e.message, e
            else:
                raise AssertionError(error)
    """)


@pytest.mark.smoke
def test_asynchronous_streams_side_by_side(run_client):
    run_client("""
        import asyncio, openai
        async def main():
            client = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0)
            async def one(i):
                stream = await client.chat.completions.create(model="demo", temperature=0, stream=True,
                    messages=[{"role": "user", "content": f"What is the opposite of {'hot cold up down'.split()[i % 4]}?"}])
                return "".join([c.choices[0].delta.content or "" async for c in stream])
            texts = await asyncio.gather(*(one(i) for i in range(32)))
            assert texts[:4] == texts[4:8] and len(set(texts)) == 4, texts
            assert all(t.startswith("The opposite of") for t in texts), texts
        asyncio.run(main())
    """)


def test_embeddings(run_client, tmp_path):
    live = LiveServer(tmp_path / "var", model=str(encoder(tmp_path, "bert"))).start()
    program = """
        import openai
        client = openai.OpenAI(base_url=URL + "/v1", api_key="anything", max_retries=0)
        made = client.embeddings.create(model="bert-plain", input=["hello", "world"])
        numbers = client.embeddings.create(model="bert-plain", input=["hello", "world"], encoding_format="float")
        assert [d.index for d in made.data] == [0, 1]
        assert made.usage.prompt_tokens == numbers.usage.prompt_tokens > 0
        for decoded, plain in zip(made.data, numbers.data):
            assert max(abs(a - b) for a, b in zip(decoded.embedding, plain.embedding)) < 1e-7
        assert abs(sum(x * x for x in made.data[0].embedding) - 1) < 1e-5
        try:
            client.embeddings.create(model="bert-plain", input="hello", dimensions=7)
        except openai.BadRequestError as error:
            assert "matryoshka" in error.message
        else:
            raise AssertionError("dimensions")
    """
    run_client(program, url=live.url)
    assert live.stop() == 0, live.log
