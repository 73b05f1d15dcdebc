"""Drives an EngineCore in the test's own process: submit, step, collect."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AdapterRef, RequestOutput, Submit
from engine.sampling.params import SamplingParams

CLIENT = 1
NEAR_TIE = 1e-3
"""Where the reference's two best logits are closer than this, either token is right."""


def core(model: Path, **options: object) -> EngineCore:
    """An engine as most tests need it: steps with a limit of time would depend on how busy the machine is, threads
    would wait for a core that another test has, and clearing a large cache takes longer than a test.
    """
    usual = {"max_step_ms": 0, "kv_cache_bytes": 48 << 20, "threads": 1}
    return EngineCore(EngineConfig(model=str(model), dtype="float32", **{**usual, **options}))


def prompts(vocab_size: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Driver:
    """Collects outputs by request id."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.outputs: dict[int, list[RequestOutput]] = defaultdict(list)

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        adapter: AdapterRef | None = None,
        generated: list[int] | None = None,
        age_s: float = 0.0,
        **params: object,
    ) -> RequestOutput | None:
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params})
        message = Submit(request_id, prompt, sampling, adapter=adapter, generated=generated or [], age_s=age_s)
        return self.engine.submit(CLIENT, message)

    def step(self) -> None:
        for output in self.engine.step().get(CLIENT, []):
            self.outputs[output.request_id].append(output)
        if self.engine.blocked:
            time.sleep(1e-3)  # as a worker does, or the thread that reads adapters would hardly get the interpreter

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.check_integrity()

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def finish_reason(self, request_id: int) -> str | None:
        return self.outputs[request_id][-1].finish_reason


class Reference:
    """transformers' own generate, greedy, in float32; with peft's adapter where one is given."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter).eval()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Of each prompt token but the first."""
        logits = self.model(input_ids=torch.tensor([prompt])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    def assert_equal(self, prompt: list[int], tokens: list[int]) -> None:
        """Token for token, up to the first near-tie."""
        out = self.model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=len(tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = out.sequences[0, len(prompt) :].tolist()
        for i, (got, want) in enumerate(zip(tokens, expected, strict=True)):
            if got != want:
                best = out.logits[i][0].topk(2).values
                gap = float(best[0] - best[1])
                assert gap < NEAR_TIE, f"token {i}: {got} instead of {want}, top-2 gap {gap:.2e}"
                return
