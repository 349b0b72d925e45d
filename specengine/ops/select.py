"""Step, the draft distributions of a frontier, and the ops that select and mix their rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specengine.errors import require_input
from specengine.ops._meanings import doubled, order_keys, padded, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.tree import Arrays, Nodes, Number, TokenTree, held, row_of

FAINT = -20.0  # below a row's best logit: further columns that the row has no use for
LARGEST = 3e38  # stands for +inf: finite in float32, so that differences of scores stay defined


class Candidates(NamedTuple):
    """Scored continuations of a layer. rows, columns: int64 [most]; log_probs: float32 [most], of the edge; scores:
    float32 [most], of the path; those from `live`, int32 [1], on are padding."""

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    scores: Tensor
    live: Tensor


@op
def top_children(logits: Tensor, k: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """Select the k best columns of each row by (value descending, column ascending), with log-probabilities.

    logits: float32, bfloat16 or float16 [rows, V]; `normalized` says that they are log-probabilities already.
    Returns log_probs float32 [rows, min(k, V)] (natural log, over the whole row) and columns int64 of the same shape.
    Ties are those of the values as given. NaN counts as -inf and +inf as 3e38; columns of -inf come last, with -inf.
    """
    if run := native.top_children[logits.device]:
        return run(logits, k, normalized)
    require("logits: floating [rows, V]", logits)
    refuse_unless(k >= 1 and logits.shape[1] >= 1, "k", "1 or more, of 1 column or more", k)
    k = min(k, logits.shape[1])
    if run := kernels.top_children[logits.device]:
        return run(logits, k, normalized)
    values = defined(logits.float())
    columns = order_keys(values).topk(k).indices
    best = values.gather(1, columns)
    if normalized:
        return best, columns
    # finite also in rows of -inf alone
    peak = best[:, :1].clamp(min=torch.finfo(torch.float32).min)
    return (best - peak) - (values - peak).exp().sum(1, keepdim=True).log().clamp(min=0.0), columns


@op
def best_candidates(
    logits: Tensor,
    scores: Tensor,
    live: Tensor,
    most: int,
    *,
    limit: Number | None = None,
    log_gate: Number | None = None,
    bound: Number | None = None,
    normalized: bool = False,
) -> Candidates:
    """Select the `most` best continuations of a layer by path log-probability, as far as they pass gate and bound.

    logits: float32, bfloat16 or float16 [rows, V], read as in `top_children`, of which the first `live` rows count;
    scores: float32 [rows], the rows' own path log-probabilities; on the same device or on the host, and the results are
    where they are. A candidate's score is its row's plus its log-probability.
    limit, log_gate, bound: as here, or numbers of Python, for logits on a CPU; results are no wider than such a limit.
    limit: int32 [1], fewer than `most`; nothing passes where it is 0 or less. log_gate: float32 [1], 0 or less; with m
    the layer's best score, only scores of m + log_gate and above pass. bound: float32 [1]; only scores above it pass.
    Ordered by (score descending, row ascending, log-probability descending, column ascending); -inf never passes.
    Sources: TALON Alg. 2 (gate); SALF Alg. 2 (bounded queue).
    """
    if run := native.best_candidates[logits.device]:
        return Candidates(*run(logits, scores, live, most, limit, log_gate, bound, normalized))
    if limit is not None and not isinstance(limit, Tensor):
        most = max(1, min(most, int(limit)))
        limit = held(limit)
    log_gate, bound = (
        None if value is None else held(value, torch.float32) for value in (log_gate, bound)
    )
    require(
        "logits: floating [rows, V]; scores: float32 [rows]; live: int32 [1]; limit: int32 [1]; "
        "log_gate: float32 [1]; bound: float32 [1]",
        logits,
        scores,
        live,
        limit,
        log_gate,
        bound,
    )
    refuse_unless(
        most >= 1 and logits.shape[1] >= 1, "most", "1 or more, of 1 column or more", most
    )
    if run := kernels.best_candidates[logits.device]:
        return run(logits, scores, live, most, limit, log_gate, bound, normalized)
    device, home = logits.device, scores.device
    live, scores = live.to(device), scores.to(device)
    scores = scores.masked_fill(
        torch.arange(len(scores), device=device, dtype=torch.int64) >= live, -math.inf
    )
    log_probs, best = top_children(logits, most, normalized)
    paths_of_all = (defined(scores)[:, None] + log_probs).reshape(-1)
    passes = paths_of_all > -math.inf
    if paths_of_all.numel() and log_gate is not None:
        # no gate where inf - inf has no value
        passes &= ~(paths_of_all < paths_of_all.max() + log_gate.to(device))
    if bound is not None:
        passes &= paths_of_all > bound.to(device)
    order = (
        order_keys(paths_of_all.masked_fill(~passes, -math.inf))
        .topk(min(most, paths_of_all.shape[0]))
        .indices
    )
    count = passes.sum(0, keepdim=True).clamp(max=most)
    if limit is not None:
        count = torch.minimum(count, limit.to(device).clamp(min=0))
    chosen = (
        order // best.shape[1],
        best.reshape(-1)[order],
        log_probs.reshape(-1)[order],
        paths_of_all[order],
    )
    padding = torch.arange(order.shape[0], device=device, dtype=torch.int64) >= count
    rows, columns, edges, paths = (
        padded(part.masked_fill(padding, 0), most).to(home) for part in chosen
    )
    return Candidates(rows, columns, edges, paths, count.int().to(home))


@op
def top_entropy(logits: Tensor, top: int, normalized: bool = False) -> Tensor:
    """Return -sum p log p over the `top` most likely columns of each row, in nats; p is over the whole row.

    logits: as in `top_children`. Returns float32 [rows]; 0 for a row of -inf alone. Source: C2T App. C.
    """
    if run := native.top_entropy[logits.device]:
        return run(logits, top, normalized)
    require("logits: floating [rows, V]", logits)
    refuse_unless(top >= 1 and logits.shape[1] >= 1, "top", "1 or more, of 1 column or more", top)
    top = min(top, logits.shape[1])
    if run := kernels.top_entropy[logits.device]:
        return run(logits, top, normalized)
    log_probs = doubled(top_children(logits, top, normalized)[0])
    return -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(1).float()


@op
def mix_rows(
    logits: Tensor,
    more: int,
    left: Sequence[float],
    places: Sequence[int],
    probabilities: Sequence[float],
    normalized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return rows that are `more` columns wider and keep the share `left` of their distribution; some columns gain.

    logits: float32, bfloat16 or float16 [rows, V]; `normalized` says that they are log-probabilities already, and so
    are the results; results for logits are logits, whose first columns stay as they are. left: above 0, at most 1, for
    each row; places: distinct, row * (V + more) + column, each in a row of which less than 1 is left;
    probabilities: above 0, what each of these gains. Further columns that gain nothing have a probability next to 0, or
    of 0 where `normalized`.

    Returns the rows, and uint8 alike: 1 for a column that has gained.
    """
    if logits.dtype is not torch.float16 and (run := native.mix_rows[logits.device]):
        return run(logits, more, left, places, probabilities, normalized)
    require("logits: floating [rows, V]", logits)
    refuse_unless(len(left) == len(logits), "left", f"{len(logits)}", len(left))
    refuse_unless(
        len(probabilities) == len(places), "probabilities", f"{len(places)}", len(probabilities)
    )
    refuse_unless(more >= 0, "more", "0 or more", more)
    columns, device = logits.shape[1], logits.device
    logs = torch.tensor([math.log(share) for share in left], device=device, dtype=torch.float32)[
        :, None
    ]
    if normalized:
        levels, filler = torch.zeros_like(logs), torch.full_like(logs, -math.inf)
        kept = logits + logs.to(logits.dtype)
    else:
        log_probs, best = top_children(logits, 1)
        peaks = logits.gather(1, best).float()
        levels, filler, kept = peaks - log_probs - logs, peaks + FAINT, logits
    mixed = torch.cat([kept, filler.to(logits.dtype).expand(-1, more)], 1)
    raised = torch.zeros(mixed.shape, dtype=torch.uint8, device=device)
    require_input(
        "places: not all of them are in the rows",
        all(0 <= place < mixed.numel() for place in places),
    )
    index = torch.tensor(list(places), dtype=torch.int64, device=device)
    gains = torch.tensor(list(probabilities), dtype=torch.float32, device="cpu")
    flat, added = mixed.view(-1), gains.to(device).log() + levels[index // (columns + more), 0]
    flat[index] = torch.logaddexp(flat[index].float(), added).to(logits.dtype)
    raised.view(-1)[index] = 1
    return mixed, raised


class Drafted(NamedTuple):
    """Draft distributions of a frontier, as in Step: logits, [rows, V]; token_ids, int64 [V], or None; whether
    the logits are log-probabilities; marks, uint8 [rows, V], or None for all 0. copies: are mixed in, or None."""

    logits: Tensor
    token_ids: Tensor | None
    normalized: bool
    marks: Tensor | None
    copies: Any = None

    def mixed(self, tree: Arrays, frontier: Nodes) -> "Drafted":
        """Return the same with its copies mixed in, as they follow the nodes of the frontier."""
        if self.copies is None:
            return self
        arguments = (
            self.logits,
            (tree[0].cpu(), tree[1].cpu()),
            frontier.ids.cpu(),
            frontier.live.cpu(),
            self.normalized,
        )
        plain = self.logits.is_cpu and self.logits.dtype is not torch.float16
        changes = self.copies.mix(*arguments) if plain else mix_copies(self.copies, *arguments)
        if changes is None:
            return self._replace(copies=None)
        logits, marks, fresh = changes  # the columns that gain are marked with 1, which is COPIED
        return Drafted(
            logits, ids_with(self, fresh) if fresh else self.token_ids, self.normalized, marks
        )


def ids_with(step: "Drafted | Step", new: list[int]) -> Tensor:
    """Return the target's ids of the step's columns and of new ones after them."""
    ids = (
        torch.arange(step.logits.shape[1], device=step.logits.device, dtype=torch.int64)
        if step.token_ids is None
        else step.token_ids
    )
    return torch.cat([ids, ids.new_tensor(new)])


def mix_copies(
    copies: Any,
    logits: Tensor,
    tree: tuple[Tensor, Tensor],
    nodes: Tensor,
    live: Tensor,
    normalized: bool,
) -> tuple[Tensor, Tensor, list[int]] | None:
    """Return the rows and marks of `mix_rows` for the copies' plan, and the tokens of the columns added, or None."""
    plan = copies.plan(tree, nodes, live, logits.shape[1])
    if plan is None:
        return None
    left, places, gains, fresh = plan
    left += [1.0] * (logits.shape[0] - len(left))
    return *mix_rows(logits, len(fresh), left, places, gains, normalized), fresh


def defined(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf).clamp(max=LARGEST)


class Children(NamedTuple):
    """Proposed tree nodes. parents, tokens: int64 [m], a node and a target id; log_probs: float32 [m], of the edge;
    those from `live`, int32 [1], on are padding."""

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    live: Tensor


# Bits of a mark: which other sources than the draft itself a continuation comes from.
COPIED = 1  # from the text, or from the one that the caller expects
RECYCLED = 2  # the target chose it after the same token before
FREE = 4  # proposed without a draft pass; alone: a grammar forces it


@dataclass(frozen=True)
class Step:
    """Draft distributions of the nodes of a frontier.

    logits      [rows, draft vocabulary], one row per node
    token_ids   int64 [draft vocabulary]: the target's id of each column; None where they are the columns themselves;
                on the device of the results
    normalized  the logits are log-probabilities already; their rows may sum to less than one, and -inf marks
                a continuation that was not proposed
    hidden      [rows, hidden size], where a rule wants them
    marks       uint8 [rows, draft vocabulary]: COPIED and RECYCLED where such a source has raised a continuation, FREE
                alone in rows where a grammar forces one; None where there is nothing of the kind
    further     [positions, draft vocabulary], as `logits`: of the positions after those of the frontier's only node,
                where the draft gives several at once; None elsewhere, as where copies are mixed in or a grammar forces
    conditioned whether the draft has run all positions ahead, and only reads a node's token for the next one's row
    """

    logits: Tensor
    token_ids: Tensor | None = None
    normalized: bool = False
    hidden: Tensor | None = None
    marks: Tensor | None = None
    further: Tensor | None = None
    conditioned: bool = False
    # what an op may read instead, where copies are not mixed in yet
    unmixed: ClassVar[Drafted | None] = None

    def best_children(self, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, float32, and tokens, int64, [rows, min(count, vocabulary)], best first in each row.

        A continuation that was not proposed has -inf.
        """
        log_probs, columns = top_children(self.logits, count, normalized=self.normalized)
        return log_probs, self.tokens_of(columns)

    def candidates(
        self,
        tree: TokenTree,
        frontier: Nodes,
        most: int,
        *,
        limit: Number | None = None,
        log_gate: Number | None = None,
        bound: Number | None = None,
    ) -> Candidates:
        """Select the `most` best continuations of all frontier nodes together; see `best_candidates`."""
        return best_candidates(
            self.logits,
            tree.path_log_probs.index_select(0, frontier.ids),
            frontier.live,
            most,
            limit=limit,
            log_gate=log_gate,
            bound=bound,
            normalized=self.normalized,
        )

    def children(self, frontier: Nodes, found: Candidates) -> Children:
        """Return candidates as nodes under the frontier."""
        return Children(
            frontier.ids.index_select(0, found.rows),
            self.tokens_of(found.columns),
            found.log_probs,
            found.live,
        )

    def tokens_of(self, columns: Tensor) -> Tensor:
        return columns if self.token_ids is None else self.token_ids[columns]

    def row(self, index: Tensor) -> "Step":
        """Return the step of one of the nodes alone; index: int64 [1]."""
        hidden, marks = (
            None if part is None else row_of(part, index) for part in (self.hidden, self.marks)
        )
        return Step(row_of(self.logits, index), self.token_ids, self.normalized, hidden, marks)

    def entropy(self, top: int | None = None) -> Tensor:
        """Return the entropy of each row, float32 [rows], in nats; with `top` over its likeliest tokens alone."""
        return top_entropy(self.logits, top or self.logits.shape[1], normalized=self.normalized)

    def add_best_children(self, tree: TokenTree, frontier: Nodes, count: int) -> Nodes:
        """Append the `count` most likely children of each frontier node; return them in creation order."""
        log_probs, tokens = self.best_children(count)
        # only such rows are sparse: a full softmax gives every column some probability
        proposed = log_probs > -math.inf if self.normalized else None
        return tree.add_children(frontier, tokens, log_probs, proposed)
