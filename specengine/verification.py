"""The one verification rule, greedy and sampled: follow the target's own choices down the tree."""

from __future__ import annotations

from collections.abc import Callable

from specengine.tree import TokenTree


def walk(
    tree: TokenTree,
    choose: Callable[[int], int | None],
    commit: Callable[[int], bool],
) -> tuple[list[int], list[int]]:
    """Accepted node ids (root first) and committed tokens (those of the path below the root, then one more).

    choose  the target's token after a node, given the tokens committed so far; None where its logits are not finite
    commit  takes a chosen token, in order; True ends the walk, and the token is the last one committed

    At each node the target chooses once. While a child carries the chosen token, the walk moves there; the first
    token that no child carries is the bonus token. Lossless for any tree that does not depend on the noise of the
    choices, and no lossless rule accepts more. A node below the root whose logits are not finite is not entered:
    its token becomes the last one.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = [0]
    committed: list[int] = []
    token = choose(0)
    while token is not None:
        committed.append(token)
        if commit(token):
            break
        node = child.get((path[-1], token))
        if node is None:
            break
        token = choose(node)
        if token is not None:
            path.append(node)
    return path, committed
