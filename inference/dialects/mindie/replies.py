"""What renders the answers of each endpoint, by the numbers that instances tell each other."""

from __future__ import annotations

from inference.dialects.mindie import chat, completions, native, tgi, triton, vllm
from inference.dialects.mindie.requests import MessageType

REPLIES = {
    MessageType.TGI: tgi.make_reply,
    MessageType.GENERAL_TGI: tgi.make_reply,
    MessageType.VLLM: vllm.make_reply,
    MessageType.OPENAI: chat.make_reply,
    MessageType.VLLM_OPENAI: chat.make_reply,
    MessageType.VLLM_OPENAI_COMP: completions.make_reply,
    MessageType.INFER: native.make_reply,
    MessageType.TRITON: triton.make_reply,
    MessageType.TRITON_TOKEN: triton.make_reply,
}
