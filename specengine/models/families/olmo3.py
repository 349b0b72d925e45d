"""OLMo 3: the blocks of OLMo 2, with windows in three layers of four."""

from dataclasses import replace

from specengine.models.families import Family
from specengine.models.families.olmo2 import FAMILY as FULL, LAYER

FAMILY = Family(layer=replace(LAYER, attention=replace(FULL.attention, windows="by type")))
