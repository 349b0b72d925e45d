"""Disco: the EAGLE beam, or a chain, ended by a classifier that looks at the draft's distribution."""

from dataclasses import dataclass

from specengine.ops import Flag, Nodes, Step, TokenTree, classify_row, held, number, row_of
from specengine.policies import Beam, _classifier, require


@dataclass
class Disco(Beam):
    """Go on while the classifier gives the level just scored at least `threshold` to hold an accepted token.

    It reads the distribution that the level's best node came from: its 10 largest probabilities, its entropy and the
    level's depth. With a width of 1 the level is one token, as in the published rule for chains.

    classifier  `auto`: the one that ships; or the path of a file that `specengine train classifier` wrote
    threshold   probability, 0 to 1

    Source: Disco, Mamou et al. 2024; features and settings as in Learning to Draft, A.1.
    """

    classifier: str = "auto"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require("disco", "threshold", self.threshold, "0 to 1", 0 <= self.threshold <= 1)
        self._learned = _classifier.load("disco", self.classifier)

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        best = beam.ids.index_select(0, tree.scores(beam).argmax(0, keepdim=True))
        row = (frontier.ids == tree.parents.index_select(0, best)).int().argmax(0, keepdim=True)
        logits = row_of(step.logits, row)
        parts, facts = self._learned.parts[logits.device], self._learned.facts
        depth = held(number(tree.passes) + (facts["depth_base"] - 1)).to(logits.device)
        sure = classify_row(logits, facts["top"], depth, parts, step.normalized)
        return number(sure.to(tree.device)) < self.threshold
