"""Chat templates with the habits of published ones, for the tiny tokenizer's special tokens."""

from __future__ import annotations

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
