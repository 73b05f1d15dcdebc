"""Converts a model into llama.cpp's format with llama.cpp's own converter, whatever tokenizer the model has.

    python gguf_converter.py LLAMA_CPP_SOURCES MODEL TYPE TARGET

The converter refuses tokenizers that it does not know by a hash. Prompts are token ids here, so how llama.cpp splits
texts does not matter: any name that it knows will do.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the converter as its own command."""
    sources, model, kind, target = sys.argv[1:]
    sys.path[:0] = [sources, str(Path(sources, "gguf-py"))]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    # Tried first for some families; it needs another package only to find that there is no such vocabulary.
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", kind, "--outfile", target]
    runpy.run_path(str(Path(sources, sys.argv[0])), run_name="__main__")


if __name__ == "__main__":
    main()
