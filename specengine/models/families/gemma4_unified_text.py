"""Gemma 4 in one with pictures and sounds that no towers read, its text: as Gemma 4's."""

from dataclasses import replace

from specengine.models.families import gemma4_text

FAMILY = replace(gemma4_text.FAMILY, gguf=None)  # whose files are called Gemma 4
