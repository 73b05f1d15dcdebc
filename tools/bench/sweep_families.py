"""Serves every family of language models of transformers at a tiny size, and compares its tokens with transformers'.

    python -m tools.bench.sweep_families [--variants [NAME ...]] [--only NAME ...] [--timeout S] [--markdown FILE]

Each model has random weights, is made in a process of its own (a crash costs one row), and answers prompts that go past
every limit of its configuration: windows, chunks, original lengths. A row is `exact` (token for token, in float32),
`refused` with the engine's reason, `wrong`, `crashed`, or `unmade` where transformers itself cannot make or run the
model. Run it at each upgrade of transformers. It downloads nothing, and exits with 1 when a row is wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import words
from engine.messages import Submit
from engine.models import long_rope
from engine.models.files import ModelError, longest_position, max_model_len
from engine.models.wrappers import generator_class
from engine.sampling.params import SamplingParams
from tests.models.random_models import DEMO, TOKENIZER_FILES
from tests.models.tiny_families import VARIANTS, tiny_config, variant_fits

VERDICTS = ("exact", "refused", "wrong", "crashed", "unmade")
PROMPTS = (70, 5, 41)
NEW_TOKENS = 16
MAX_LENGTH = 128
MOST_WEIGHTS = 100_000_000
HEAD = """\
<!-- Written by `python -m tools.bench.sweep_families --markdown docs/models.md`. -->

A model is accepted or refused when it is loaded, by its own configuration and weights: its logits must equal those of
transformers, whatever else is in the step (`engine/models/probe.py`). A model that fails this check fails its
deployment, with the reason. This page lists the result for every family of language models in transformers {version},
also of those that read images or sound beside text, whose decoder alone is served. The models have tiny shapes and
random weights, and the prompts exceed every limit of the configuration: {totals}.
Another configuration of a listed family may have another result.

Images, sound and video are refused in requests; the parts of a model that read them are not kept in memory. Sequences
longer than the original length of a rotary embedding of the kind `longrope` (Phi-3, Phi-4-mini) are computed as
transformers computes them; one that grows past it is computed again from its beginning, once.

Run the sweep after every upgrade of transformers and review the changes. It takes some minutes, and exits with 1 if a
row is wrong or its process crashed. `--variants` adds windows, scaled rotary embeddings, biases and odd widths.
"""
NEAR_TIE = 1e-3
"""If the two best reference logits are closer than this, either token counts as right."""


def main() -> int:
    """Run all rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variants", nargs="*", choices=[*VARIANTS], metavar="NAME", help="these, or all, beside the plain"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these families alone")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one row")
    parser.add_argument("--markdown", type=Path, help="write the table of the plain families there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    variants = [] if options.variants is None else options.variants or [name for name in VARIANTS if name]
    rows: list[tuple[str, str, str, str]] = []
    families = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    for family in options.only or families:
        for variant in ["", *variants]:
            if not variant_fits(family, variant):
                continue
            verdict, detail = in_a_process(family, variant, options.timeout)
            rows.append((family, variant, verdict, detail))
            print(f"{verdict:8} {family:28} {variant:14} {detail}", flush=True)
    totals = {verdict: sum(row[2] == verdict for row in rows) for verdict in VERDICTS}
    print(f"transformers {transformers.__version__}:", ", ".join(f"{n} {verdict}" for verdict, n in totals.items()))
    if options.markdown:
        write_markdown(options.markdown, rows, totals)
    return int(totals["wrong"] + totals["crashed"] > 0)


def warm_up() -> None:
    """Compile the kernels once, before the row processes fork."""
    answer(DEMO, [[5, 6, 7]], MAX_LENGTH)


def in_a_process(family: str, variant: str, timeout_s: int) -> tuple[str, str]:
    """Run one row in a process of its own; returns its verdict and detail, also after a crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            found = judge(family, variant)
        except BaseException as error:  # the process ends here, and what happened is the row
            found = ("crashed", f"{type(error).__name__}: {error} {traceback.format_exc(limit=-2)}")
        os.write(writing, json.dumps([part[:2000] for part in found]).encode())
        os._exit(0)
    os.close(writing)
    deadline, status = time.monotonic() + timeout_s, None
    while status is None:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = code
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reading)
            return "crashed", f"it took more than {timeout_s} s"
        time.sleep(0.02)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    if os.WIFSIGNALED(status):
        return "crashed", signal.Signals(os.WTERMSIG(status)).name
    verdict, detail = json.loads(text)
    return verdict, " ".join(detail.split())[:400]


def judge(family: str, variant: str) -> tuple[str, str]:
    """Make the model, ask transformers, ask the engine."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / family
        try:
            make(target, family, variant)
            config = AutoConfig.from_pretrained(target)
            if config.is_encoder_decoder:  # the engine says so
                answer(target, [[5, 6, 7]], MAX_LENGTH)
            model = generator_class(config).from_pretrained(target, dtype=torch.float32).eval()
            vocab = int(model.config.get_text_config().vocab_size)
            generator = torch.Generator().manual_seed(1)
            by_sequence = long_rope.original_length(model, longest_position(model.config)) is not None
            limit = min(MAX_LENGTH, max_model_len(model.config, 0, by_sequence))
            lengths = [min(n, limit - NEW_TOKENS) for n in PROMPTS]
            asked = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
            expected = [generate(model, prompt) for prompt in asked]
        except ModelError as error:
            return "refused", str(error)
        except Exception as error:  # transformers' own; the row says so
            return "unmade", f"{type(error).__name__}: {error}"
        del model
        try:
            answers = answer(target, asked, limit)
        except ModelError as error:
            return "refused", str(error)
    for prompt, tokens, (wanted, gaps) in zip(asked, answers, expected, strict=True):
        for i, (got, want) in enumerate(zip(tokens, wanted, strict=True)):
            if got != want and gaps[i] >= NEAR_TIE:
                return "wrong", f"prompt of {len(prompt)}: token {i} is {got} instead of {want}"
            if got != want:
                break
    return "exact", ""


def make(target: Path, family: str, variant: str) -> None:
    """Write the tiny model: every matrix random and large enough that a mistake moves the logits."""
    config = tiny_config(family, variant)
    kind, both = generator_class(config), config.is_encoder_decoder
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size} weights: its configuration was not made small")
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.add_(torch.randn_like(weight) * 0.05)
            elif "embed" in name or "wte" in name:
                weight.normal_(0, 1)
            else:
                weight.normal_(0, 1.4 * weight.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.config.is_encoder_decoder = both  # as published; the class of its decoder unsets it
    model.save_pretrained(target)
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO / file, target / file)


@torch.inference_mode()
def generate(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens by transformers, and by how much each was better than the next."""
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].float().topk(2).values.tolist() for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best]


def answer(directory: Path, asked: list[list[int]], limit: int) -> list[list[int]]:
    """Greedy tokens by the engine: staggered, in chunks of a small budget."""
    config = EngineConfig(
        model=str(directory), dtype="float32", threads=1, max_num_batched_tokens=17, max_num_seqs=4,
        max_model_len=limit, kv_cache_bytes=64 << 20,
    )  # fmt: skip
    core = EngineCore(config)
    tokens: dict[int, list[int]] = {}
    for i, prompt in enumerate(asked):
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        refused = core.submit(1, Submit(i, prompt, sampling))
        if refused is not None:
            raise RuntimeError(f"the engine refuses a request: {words(refused.error)}")
        collect(core, tokens)
        collect(core, tokens)
    while core.has_work:
        collect(core, tokens)
    core.close()
    return [tokens[i] for i in range(len(asked))]


def collect(core: EngineCore, tokens: dict[int, list[int]]) -> None:
    """One step."""
    for output in core.step().get(1, []):
        if output.error is not None:
            raise RuntimeError(f"a step failed: {words(output.error)}")
        tokens.setdefault(output.request_id, []).extend(output.token_ids)


def write_markdown(path: Path, rows: list[tuple[str, str, str, str]], totals: dict[str, int]) -> None:
    """The plain families as a page of the documentation."""
    plain = {family: (verdict, detail) for family, variant, verdict, detail in rows if not variant}
    served = ", ".join(f"`{family}`" for family, (verdict, _) in plain.items() if verdict == "exact")
    lines = [
        "# Models",
        "",
        HEAD.format(version=transformers.__version__, totals=", ".join(f"{n} {v}" for v, n in totals.items() if n)),
        "## Served",
        "",
        *textwrap.wrap(served, 118, break_on_hyphens=False),
        "",
        "## Refused",
        "",
        "| family | reason |",
        "| --- | --- |",
    ]
    for family, (verdict, detail) in plain.items():
        if verdict == "refused":
            lines.append(f"| `{family}` | {detail.partition('cannot be served: ')[2] or detail} |".replace("|}", "}"))
    unmade = ", ".join(f"`{family}`" for family, (verdict, _) in plain.items() if verdict == "unmade")
    if unmade:
        lines += [
            "",
            "## Not tried",
            "",
            f"No tiny model of these can be made, or transformers cannot run it: {unmade}",
        ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
