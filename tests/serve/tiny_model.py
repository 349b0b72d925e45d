"""A folder with a tiny model of random weights, its tokenizer and chat template, for servers in a process of their own.

python -m tests.serve.tiny_model FOLDER [--tools] [--other]
"""

import sys
from pathlib import Path

from tests.toy import byte_tokenizer, tiny

TOOLS = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}N{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{{ '[' + m.reasoning_content + ']' if m.reasoning_content else '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(folder: Path, tools: bool = False, other: bool = False) -> Path:
    """Save it; tools: the chat template takes them, and the context holds them; other: with other weights."""
    model = tiny(seed=int(other), max_position_embeddings=4096 if tools else 512)
    tokenizer = byte_tokenizer(TOOLS) if tools else byte_tokenizer()
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|end|>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    save(Path(sys.argv[1]), "--tools" in sys.argv, "--other" in sys.argv)
