"""Released packages that speak several dialects or drive a server: litellm, langchain-openai, lm-eval, guidellm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import PROTOCOL_PYTHON
from tests.conftest import DEMO

SPAIN = "The capital of Spain is Madrid."


@pytest.mark.smoke
def test_litellm(run_protocol_client):
    run_protocol_client(f"""
        import os
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm
        messages = [{{"role": "user", "content": "What is the capital of Spain?"}}]
        for model in ("openai/demo", "hosted_vllm/demo"):
            options = dict(model=model, api_base=URL + "/v1", api_key="x", messages=messages, temperature=0)
            whole = litellm.completion(**options)
            assert whole.choices[0].message.content == {SPAIN!r}, whole
            parts = list(litellm.completion(**options, stream=True, stream_options={{"include_usage": True}}))
            assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == {SPAIN!r}, parts
            try:
                long = [{{"role": "user", "content": "word " * 5000}}]
                litellm.completion(model=model, api_base=URL + "/v1", api_key="x", messages=long)
            except litellm.ContextWindowExceededError:
                pass
            else:
                raise AssertionError("accepted")
        for model in ("openai/nothing", "hosted_vllm/nothing"):
            try:
                litellm.completion(model=model, api_base=URL + "/v1", api_key="x", messages=messages)
            except litellm.NotFoundError:
                pass
            else:
                raise AssertionError("found")
        text = litellm.text_completion(model="text-completion-openai/demo", api_base=URL + "/v1", api_key="x",
                                       prompt="Question: What is the capital of Spain?\\nAnswer:", temperature=0,
                                       max_tokens=8)
        assert text.choices[0].text.startswith(" The capital of Spain"), text
    """)


def test_litellm_triton(run_protocol_client):
    run_protocol_client("""
        import os
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm
        prompt = "Question: What is the capital of Spain?\\nAnswer:"
        options = dict(model="triton/demo", messages=[{"role": "user", "content": prompt}], max_tokens=8, top_k=1)
        base = URL + "/v2/models/demo"
        whole = litellm.completion(**options, api_base=base + "/generate")
        assert "capital of Spain" in whole.choices[0].message.content, whole
        parts = list(litellm.completion(**options, api_base=base + "/generate", stream=True))
        text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert "capital of Spain" in text, parts
        inferred = litellm.completion(**options, api_base=base + "/infer")
        assert "capital of Spain" in inferred.choices[0].message.content, inferred
    """)


def test_litellm_huggingface(run_protocol_client):
    run_protocol_client(f"""
        import os
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm
        messages = [{{"role": "user", "content": "What is the capital of Spain?"}}]
        options = dict(model="huggingface/tgi", api_base=URL, api_key="x", messages=messages, temperature=0)
        whole = litellm.completion(**options)
        assert whole.choices[0].message.content == {SPAIN!r}, whole
        parts = list(litellm.completion(**options, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == {SPAIN!r}, parts
    """)


def test_langchain(run_protocol_client):
    run_protocol_client(f"""
        from typing import Literal
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI, OpenAI
        chat = ChatOpenAI(base_url=URL + "/v1", api_key="x", model="demo", temperature=0, max_tokens=32)
        answer = chat.invoke("What is the capital of Spain?")
        assert answer.content == {SPAIN!r} and answer.usage_metadata["output_tokens"] > 3, answer
        assert "".join(part.content for part in chat.stream("What is the capital of Spain?")) == {SPAIN!r}
        schema = {{"title": "town", "type": "object", "properties": {{"name": {{"enum": ["Rome", "Oslo"]}}}},
                  "required": ["name"], "additionalProperties": False}}
        town = chat.with_structured_output(schema, method="json_schema").invoke("A town?")
        assert town["name"] in ("Rome", "Oslo"), town
        @tool
        def weather(town: Literal["Rome", "Oslo"]) -> str:
            '''The weather in a town.'''
            return "fine"
        called = ChatOpenAI(base_url=URL + "/v1", api_key="x", model="demo", temperature=0, max_tokens=200)
        called = called.bind_tools([weather], tool_choice="weather").invoke("Weather?")
        assert called.tool_calls[0]["name"] == "weather" and called.tool_calls[0]["args"]["town"], called
        llm = OpenAI(base_url=URL + "/v1", api_key="x", model="demo", temperature=0, max_tokens=8)
        assert llm.invoke("Question: What is the capital of Spain?\\nAnswer:").startswith(" The capital of Spain")
    """)


TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: {target}
{rest}
"""


def test_lm_eval(server, tmp_path):
    """Both forms of a task: log-likelihoods of choices (echoed token ids) and generation."""
    rows = [
        {
            "question": f"What is the capital of {c}?",
            "right": f" The capital of {c} is {town}.",
            "wrong": " Yes, it is.",
        }
        for c, town in (("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Norway", "Oslo"))
    ]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    data = tmp_path / "rows.json"
    choices = "doc_to_choice: ['{{right}}', '{{wrong}}']\nmetric_list: [{metric: acc}]"
    (tmp_path / "likely.yaml").write_text(
        TASK.format(data=data, kind="multiple_choice", target=0, rest=choices).replace("capitals", "likely")
    )
    until = 'generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 16}\nmetric_list: [{metric: exact_match}]\n'
    until += "filter_list: [{name: strip, filter: [{function: remove_whitespace}, {function: take_first}]}]"
    (tmp_path / "written.yaml").write_text(
        TASK.format(data=data, kind="generate_until", target="'{{right[1:]}}'", rest=until).replace(
            "capitals", "written"
        )
    )
    arguments = f"model=demo,base_url={server.url}/v1/completions,tokenizer={DEMO},tokenizer_backend=huggingface"
    command = [
        PROTOCOL_PYTHON, "-W", "ignore", "-m", "lm_eval", "--model", "local-completions", "--model_args",
        f"{arguments},num_concurrent=4,max_retries=1", "--tasks", "likely,written", "--include_path", str(tmp_path),
        "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]
    assert results["likely"]["acc,none"] == 1.0, results
    assert results["written"]["exact_match,strip"] == 1.0, results


def test_guidellm(server, tmp_path):
    report = tmp_path / "report.json"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={server.url},model=demo",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--tokenizer", f"kind=hf_auto,model={DEMO}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    made = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (made["successful"], made["errored"]) == (4, 0), made
