"""Whether a model can be had at all, found out quickly: from_pretrained asks a Hub that is away for half a minute."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants, file_exists, try_to_load_from_cache

CONFIGS = ("config.json", "adapter_config.json")  # of a model, and of an adapter alone
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")


def why_absent(name: str, *, offline: bool = False) -> str | None:
    """Why neither the disk nor the Hub has a model `name`; None where one of them has.

    What looks like a path is looked up on the disk alone.
    """
    if Path(name).exists():
        return None
    if looks_like_path(name):
        return "there is no such file or folder"
    if ":" in name:
        return "names with a colon are those of other programs; give the model's id on the Hub, or a GGUF file's path"
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
            return None
        if offline or constants.HF_HUB_OFFLINE:
            return "there is no such folder, and the Hub's cache does not hold it"
        there = any(file_exists(name, file) for file in CONFIGS)
        return None if there else "there is no such folder, and no such model on the Hub"
    except Exception as error:  # the Hub's own, of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"there is no such folder, and the Hub does not answer ({reason})"


def looks_like_path(name: str) -> bool:
    """Whether this cannot be meant as a name on the Hub, which is `model` or `owner/model`."""
    written = name.startswith((".", "~")) or Path(name).is_absolute() or "\\" in name or name.endswith(("/", os.sep))
    return written or name.count("/") > 1 or name.lower().endswith(WEIGHTS)
