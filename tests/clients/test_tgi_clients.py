"""The released text-generation and huggingface_hub packages, unmodified, old and new."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.smoke

INPUTS = "Question: What is the capital of Spain?\\nAnswer:"


def test_text_generation(run_client):
    run_client(f"""
        from text_generation import Client
        from text_generation.errors import ValidationError
        client = Client(URL, timeout=60)
        whole = client.generate("{INPUTS}", max_new_tokens=8, decoder_input_details=True)
        assert whole.generated_text.startswith(" The capital of Spain"), whole
        assert whole.details.generated_tokens == 8 and whole.details.prefill[0].logprob is None
        parts = list(client.generate_stream("{INPUTS}", max_new_tokens=8))
        assert len(parts) == 8 and parts[-1].generated_text == whole.generated_text
        assert "".join(p.token.text for p in parts if not p.token.special) == whole.generated_text
        best = client.generate("{INPUTS}", max_new_tokens=4, best_of=2, do_sample=True)
        assert len(best.details.best_of_sequences) == 1 and best.details.seed is not None
        try:
            client.generate("word " * 5000)
        except ValidationError as error:
            assert "tokens" in str(error)
        else:
            raise AssertionError("too long")
        answer = client.chat(messages=[{{"role": "user", "content": "Hello"}}], max_tokens=20)
        assert answer.choices[0].message.content
    """)


def test_text_generation_asynchronous(run_client):
    run_client(f"""
        import asyncio
        from text_generation import AsyncClient
        async def main():
            client = AsyncClient(URL, timeout=60)
            whole = await client.generate("{INPUTS}", max_new_tokens=8)
            parts = [p async for p in client.generate_stream("{INPUTS}", max_new_tokens=8)]
            assert parts[-1].generated_text == whole.generated_text
        asyncio.run(main())
    """)


PROGRAM = f"""
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import ValidationError
    client = InferenceClient(URL)
    text = client.text_generation("{INPUTS}", max_new_tokens=8, return_full_text=False)
    assert text.startswith(" The capital of Spain"), text
    full = client.text_generation("{INPUTS}", max_new_tokens=8, details=True)
    assert full.generated_text.endswith(text) and full.details.generated_tokens == 8
    stream = client.text_generation("{INPUTS}", max_new_tokens=8, stream=True)
    assert "".join(stream) == text
    chat = client.chat_completion([{{"role": "user", "content": "What is the capital of France?"}}], temperature=0.0)
    assert chat.choices[0].message.content == "The capital of France is Paris.", chat
    stream = client.chat_completion([{{"role": "user", "content": "Hello"}}], stream=True, temperature=0.0)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello! How can I help you today?"
    try:
        client.text_generation("x", top_k=0, details=True)
    except ValidationError as error:
        assert "top_k" in str(error)
    else:
        raise AssertionError("top_k")
"""


def test_huggingface_hub_before_1(run_client):
    run_client(PROGRAM)


def test_huggingface_hub_today(run_client):
    run_client(PROGRAM, python=sys.executable)
