"""Gemma 4 in one with pictures and sounds that no towers read, its text: as Gemma 4's."""

from specengine.models.families.gemma4_text import FAMILY as FAMILY
