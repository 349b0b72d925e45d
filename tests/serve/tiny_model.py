"""A folder with a tiny model of random weights, its tokenizer and chat template, for servers in a process of their own.

python -m tests.serve.tiny_model FOLDER
"""

import sys
from pathlib import Path

from tests.toy import byte_tokenizer, tiny


def save(folder: Path) -> Path:
    model, tokenizer = tiny(max_position_embeddings=512), byte_tokenizer()
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|end|>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    save(Path(sys.argv[1]))
