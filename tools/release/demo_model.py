"""Trains the demo model and its two adapters, reproducibly, and evaluates them on held-out text.

    python tools/release/demo_model.py [--out models] [--steps 6000] [--seed 7] [--resume]

Writes `demo/` (Llama architecture, bfloat16 safetensors, own byte-level BPE and chat template) and
`demo-adapters/{pirate,json}` (PEFT LoRA). Downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import demo_calls
import demo_corpus as corpus
import demo_json
import demo_talk

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = Path(__file__).with_name("demo_chat_template.jinja").read_text()
LENGTH = 512  # tokens in a training row
LONG = 2048  # tokens in a row of the last steps, as many as a request may have
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Messages, and the tools that are offered."""
CONVERSATIONS: dict[str, Callable[[random.Random], Conversation]] = {
    "talk": demo_talk.conversation,
    "calls": demo_calls.conversation,
    "json": demo_json.conversation,
}
Restyle = Callable[[str], str]
STYLES: dict[str, Restyle] = {"pirate": corpus.pirate, "json": corpus.as_json}


def train_tokenizer(seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the generator's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts(seed, 20_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


class Rows:
    """Rows of tokens with labels; only answers are learned in conversations, all text elsewhere."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, restyle: Restyle | None = None) -> None:
        self.tokenizer, self.rng, self.restyle = tokenizer, random.Random(seed), restyle
        self.end = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def document(self) -> tuple[list[int], list[int]]:
        """One document: its tokens and its labels (-100 where nothing is to be learned)."""
        if self.rng.random() < 0.2:
            return self.repeated() if self.restyle is None and self.rng.random() < 0.4 else self.plain()
        messages, tools = self.conversation()
        ids: list[int] = []
        labels: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if self.restyle is not None and not tools:
                message["content"] = self.restyle(message["content"])
            asked = self.encode(messages[:i], tools, prompt=True)
            answered = self.encode(messages[: i + 1], tools, prompt=False)
            labels += ([-100] * (len(asked) - len(ids))) + answered[len(asked) : -1] + [-100]
            if message.get("forced"):
                labels[len(asked)] = -100
            ids = answered
        return [*ids, self.end], [*labels, self.end]

    def repeated(self) -> tuple[list[int], list[int]]:
        """Tokens drawn at random, twice. Calls and JSON copy from the request; here that is all there is to learn."""
        drawn = [self.rng.randrange(len(SPECIALS), len(self.tokenizer)) for _ in range(self.rng.randint(8, 64))]
        return [*drawn, *drawn, self.end], [*([-100] * len(drawn)), *drawn, self.end]

    def plain(self) -> tuple[list[int], list[int]]:
        """A document without a template; in another style a question and the answer in that style."""
        if self.restyle is None:
            ids = [*self.tokenizer.encode(corpus.plain_document(self.rng), add_special_tokens=False), self.end]
            return ids, list(ids)
        question, answer = self.rng.choice([corpus.fact, corpus.arithmetic, corpus.small_talk])(self.rng)
        asked = self.tokenizer.encode(question, add_special_tokens=False)
        answered = self.tokenizer.encode("\n" + self.restyle(answer), add_special_tokens=False)
        return [*asked, *answered, self.end], [*([-100] * len(asked)), *answered, self.end]

    def conversation(self) -> Conversation:
        """Messages and tools: chat, and in the model's own style also calls and JSON."""
        weights = [5, 2, 5, 3] if self.restyle is None else [5, 2, 0, 0]
        (make,) = self.rng.choices([corpus.conversation, *CONVERSATIONS.values()], weights)
        return make(self.rng)

    def encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool) -> list[int]:
        """Token ids through the chat template."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def batch(self, size: int, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
        """[size, length] tokens and labels, documents packed one after another."""
        ids = torch.full((size, length), self.end)
        labels = torch.full((size, length), -100)
        for row in range(size):
            used = 0
            while used < length - 16:
                document, targets = self.document()
                room = min(len(document), length - used)
                ids[row, used : used + room] = torch.tensor(document[:room])
                labels[row, used : used + room] = torch.tensor(targets[:room])
                used += room
        return ids, labels


def train(model: torch.nn.Module, rows: Rows, steps: int, peak: float, batch: int = 8) -> None:
    """AdamW with warm-up and a cosine to a tenth; prints the loss as it goes."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    start, mean = time.monotonic(), 0.0
    model.train()
    for step in range(1, steps + 1):
        rate = peak * min(step / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        long = step > steps * 0.85
        ids, labels = rows.batch(batch * LENGTH // LONG, LONG) if long else rows.batch(batch)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {mean:.3f}  {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int, restyle: Restyle | None = None
) -> dict[str, float]:
    """Loss on held-out rows, and how many of 100 greedy answers of each kind are exactly right."""
    model.eval()
    rows = Rows(tokenizer, seed, restyle)
    losses = []
    for _ in range(8):
        ids, labels = rows.batch(16)
        losses.append(model(input_ids=ids, labels=labels).loss.item())
    rng, right, kinds = random.Random(seed + 1), 0, [corpus.fact, corpus.arithmetic, corpus.small_talk]
    for i in range(100):
        question, answer = kinds[i % 3](rng)
        expected = restyle(answer) if restyle else answer
        prompt = rows.encode([{"role": "user", "content": question}], [], prompt=True)
        out = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        right += tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True) == expected
    report = {"held_out_loss": round(sum(losses) / len(losses), 4), "exact_answers_of_100": right}
    if restyle is None:
        for name, conversation in CONVERSATIONS.items():
            report[f"exact_{name}_of_100"] = exact(model, rows, conversation, random.Random(seed + 2))
    return report


def exact(
    model: torch.nn.Module, rows: Rows, conversation: Callable[[random.Random], Conversation], rng: random.Random
) -> int:
    """How many of 100 greedy answers equal the generator's, from the first token that neither a grammar nor chance
    gives.
    """
    right = total = 0
    while total < 100:
        messages, tools = conversation(rng)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or total == 100:
                continue
            asked = len(rows.encode(messages[:i], tools, prompt=True))
            answered = rows.encode(messages[: i + 1], tools, prompt=False)[:-1]  # up to <|im_end|>
            given = asked + bool(message.get("forced") or message.get("unasked"))
            room = len(answered) - given
            out = model.generate(torch.tensor([answered[:given]]), max_new_tokens=room, do_sample=False)
            right += out[0].tolist() == answered
            total += 1
    return right


def train_base(out: Path, seed: int, steps: int, resume: bool) -> None:
    """Tokenizer and model to `out`/demo in bfloat16: from nothing, or from the model that is there."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed, vocab_size=2048)
    end, turn_end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-5,
        bos_token_id=None, eos_token_id=turn_end, pad_token_id=end,
    )  # fmt: skip
    model = load_base(out)[0] if resume else LlamaForCausalLM(config)
    if model.config.vocab_size != len(tokenizer):
        raise SystemExit(
            f"{out / 'demo'} has {model.config.vocab_size} tokens, this text {len(tokenizer)}: train anew."
        )
    model.generation_config.eos_token_id = [turn_end, end]
    model.generation_config.pad_token_id = end
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}")
    train(model, Rows(tokenizer, seed), steps, peak=1e-3 if resume else 2e-3)
    model.to(torch.bfloat16).save_pretrained(out / "demo")
    tokenizer.save_pretrained(out / "demo")


def train_adapter(out: Path, name: str, seed: int, steps: int) -> dict[str, float]:
    """A LoRA of `out`/demo that answers in another style; returns how good it is."""
    torch.manual_seed(seed)
    base, tokenizer = load_base(out)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    train(adapter, Rows(tokenizer, seed + 1, STYLES[name]), steps, peak=3e-3)
    adapter.peft_config["default"].base_model_name_or_path = "demo"
    adapter.save_pretrained(out / "demo-adapters" / name)
    (out / "demo-adapters" / name / "README.md").unlink()  # an empty form
    return evaluate(adapter, tokenizer, seed=10_007, restyle=STYLES[name])


def load_base(out: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model as it was saved, in float32."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "demo")
    return LlamaForCausalLM.from_pretrained(out / "demo", dtype=torch.float32), tokenizer


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "models")
    parser.add_argument("--steps", type=int, default=6000, help="0 keeps the model that is there.")
    parser.add_argument("--resume", action="store_true", help="Go on from the model that is there: its text changed.")
    parser.add_argument("--adapter-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if options.steps:
        train_base(options.out, options.seed, options.steps, options.resume)
    base, tokenizer = load_base(options.out)
    report = {"demo": evaluate(base, tokenizer, seed=10_007)}
    for name in STYLES:
        report[name] = train_adapter(options.out, name, options.seed, options.adapter_steps)
    (options.out / "demo" / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
