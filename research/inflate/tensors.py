"""Large tensors made of small ones: by which rule, in which dtype, and with what constant silence is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from research.inflate.places import Axis, Heads

CONSTANT = 2.0**-40  # its square is lost beside any mean square that is not
# times the constant, over a root mean square of up to 2 ** 20: still below -2 ** 19
SILENCE = -(2.0**80)
STD = 0.02  # of random weights


@dataclass(frozen=True)
class Rule:
    """A rule that makes a large tensor of a small one: places of rows and columns, and a factor.

    columns  None for a vector
    random   entries that only meet zeros, or are never read, are random instead of zero
    """

    rows: Axis
    columns: Axis | None = None
    scale: float = 1.0
    random: bool = False

    @classmethod
    def norm(cls, axis: Axis) -> Rule:
        return cls(axis, scale=math.sqrt(axis.small / axis.size))


@dataclass(frozen=True)
class Maker:
    """Makes large tensors."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def tensor(self, rule: Rule, small: Tensor | None) -> Tensor:
        """Return the large tensor. small: None for a tensor of a layer that the small model does not have."""
        large = self._filled(rule)
        if small is None:
            return large
        part = small.detach().to(self.device)
        part = (part if rule.scale == 1.0 else part.double() * rule.scale).to(self.dtype)
        places, part = rule.rows.places.to(self.device), part[rule.rows.sources.to(self.device)]
        if rule.columns is None:
            large[places] = part
        else:
            columns = rule.columns
            part = part[:, columns.sources.to(self.device)]
            large[places[:, None], columns.places.to(self.device)] = part
        return large

    def _filled(self, rule: Rule) -> Tensor:
        columns = rule.columns
        size = [rule.rows.size] if columns is None else [rule.rows.size, columns.size]
        if not rule.random or columns is None:
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        large = torch.empty(size, dtype=self.dtype, device=self.device).normal_(
            std=STD, generator=self.generator
        )
        large[rule.rows.gaps.to(self.device)] = 0.0
        return large


def layer_rules(hidden: Axis, reads: Axis, heads: Heads, intermediate: Axis) -> dict[str, Rule]:
    """Return rules by module name. hidden: axis of the residual; reads: axis of the attention's input."""
    norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    return {
        "q_proj": Rule(heads.queries, reads, heads.query_scale, random=True),
        "k_proj": Rule(heads.keys, reads, random=True),
        "v_proj": Rule(heads.keys, reads, random=True),
        "o_proj": Rule(hidden, heads.queries),
        "gate_proj": Rule(intermediate, hidden, random=True),
        "up_proj": Rule(intermediate, hidden, random=True),
        "down_proj": Rule(hidden, intermediate),
        **{name: Rule.norm(hidden) for name in norms},
    }


def rule_of(rules: Mapping[str, Rule], name: str) -> Rule:
    """Return the rule of the tensor `...module.weight`, `...module.bias` or `...module.number.weight`."""
    *_, outer, module, kind = ["", *name.split(".")]
    rule = rules[outer if module.isdigit() else module]
    return Rule(rule.rows, None, rule.scale) if kind == "bias" else rule


def layer_state(
    layer: torch.nn.Module,
    small: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    hidden: Axis,
    maker: Maker,
) -> dict[str, Tensor]:
    """Return the state of a large layer. small: empty for a layer that changes nothing."""
    norm = torch.ones(hidden.small)
    return {
        name: maker.tensor(
            rule_of(rules, name), small[name] if small else norm if "norm" in name else None
        )
        for name in layer.state_dict()
    }


def silence(vocabulary_head: Tensor, rows: int, place: int) -> None:
    """Let the last `rows` tokens read the constant at channel `place`, so that their logits are the lowest."""
    vocabulary_head[len(vocabulary_head) - rows :, place] = SILENCE
