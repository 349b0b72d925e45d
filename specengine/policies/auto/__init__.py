"""auto: the tree that pays, by measured costs of a cycle and counted chances of its nodes; none where none does."""

from specengine.policies.auto.auto import Auto as Auto
