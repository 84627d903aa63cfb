"""A byte-level tokenizer small enough to check its tokens by hand, a byte b being the token 8 +
b, and chat templates with the habits of published ones.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_ID, BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(7)
FIRST_BYTE_ID = 8
VOCAB_SIZE = FIRST_BYTE_ID + 256

_HEAD = "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
_TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
CHAT_TEMPLATE = _HEAD + "{{ m.content + '<|end|>' }}" + _TAIL
GENERATION_CHAT_TEMPLATE = (
    _HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    + "{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    + _TAIL
)
THINKING_CHAT_TEMPLATE = (
    _HEAD
    + "{% if loop.last and m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    + "{{ m.content + '<|end|>' }}"
    + _TAIL
)
"""Like Qwen3's: only the last assistant turn has a think block."""


def byte_ids(text: str) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in text.encode("utf-8")]


def tiny_tokenizer(
    *,
    add_bos: bool = True,
    add_eos: bool = False,
    has_eos: bool = True,
    trim_offsets: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """The tokenizer; `add_*` say which special tokens it puts around a text by itself."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {char: FIRST_BYTE_ID + byte for byte, char in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    around = ["<s>"] * add_bos + ["$A"] + ["</s>"] * add_eos
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(
                single=" ".join(around), special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
            ),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>" if has_eos else None,
        pad_token="<pad>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_tokenizer(directory: Path, **options: object) -> PreTrainedTokenizerFast:
    """Writes `tiny_tokenizer(**options)` as a Hugging Face tokenizer directory and returns it."""
    tokenizer = tiny_tokenizer(**options)  # type: ignore[arg-type]
    tokenizer.save_pretrained(directory)
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (as GPT-2 does)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    code = {byte: byte for byte in printable}
    code |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(code[byte]) for byte in range(256)]


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Looks outside.",
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}  # fmt: skip
_TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
)
_THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_CALL = (
    """{{ '{"name": "' + c.function.name + '", "arguments": ' }}"""
    "{{ c.function.arguments | tojson }}{{ '}' }}"
)
_CALLS = "{% for c in m.tool_calls %}" + _CALL + "{% endfor %}"
_ASK = "{% if add_generation_prompt %}<|assistant|>{{ '<think></think>' if no_think }}{% endif %}"


def chat_template(
    *,
    tools: str = _TOOLS,
    think: str = _THINK,
    content: str = "{{ m.content }}",
    calls: str = _CALLS,
    end: str = "</s>",
    blocks: bool = False,
) -> str:
    """A template of which each part can be replaced.

    Args:
        end: of every turn.
        blocks: mark answers as generation blocks.
    """
    answer = think + content + calls + end
    if blocks:
        answer = "{% generation %}" + answer + "{% endgeneration %}"
    return (
        tools
        + "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        + "{% if m.role == 'assistant' %}{{ '<think></think>' if no_think }}"
        + answer
        + "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
        + _ASK
    )


TOOLS_TEMPLATE = chat_template()
TOOLS_BLOCKS_TEMPLATE = chat_template(blocks=True)
ENDLESS_TEMPLATE = chat_template(end="")
"""Like GLM-4's: the next turn's role is what stops an answer, and no answer holds it."""
NO_CALLS_TEMPLATE = chat_template(calls="")
"""Like Llama 3's."""
CALLS_ALONE_TEMPLATE = chat_template(content="{{ m.content if not m.tool_calls }}")
"""Like Llama 3.1's: an answer is its content or its calls."""
ONE_CALL_TEMPLATE = chat_template(
    calls="{% if m.tool_calls %}{% set c = m.tool_calls[0] %}" + _CALL + "{% endif %}"
)
"""Like gpt-oss's."""
LAST_THINKS_TEMPLATE = chat_template(think="{% if loop.last %}" + _THINK + "{% endif %}")
"""Like Qwen3's."""
NO_DEVELOPER_TEMPLATE = TOOLS_TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}"
)
"""Like Qwen2.5's: a role that is not known is passed over."""
MERGED_TEMPLATE = (
    "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
)
