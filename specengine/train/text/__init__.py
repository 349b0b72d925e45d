"""Training text that the target writes itself, and its options."""

from dataclasses import dataclass

from specengine.errors import Checked, at_least, number, option


@dataclass(frozen=True)
class SynthesisOptions(Checked):
    """Options of writing text."""

    tokens: int = option(
        at_least(1),
        default=1_000_000,
        help="total number of tokens, the users' turns included, 1 or more",
    )
    rows: int = option(
        at_least(1),
        default=128,
        help="conversations per shard, written at the same time, 1 or more",
    )
    length: int = option(
        at_least(16),
        default=512,
        help="maximum number of tokens of a conversation, 16 or more",
    )
    gib: float = option(
        at_least(0),
        default=16.0,
        help="GiB of disk that the hidden states of the native forward may take, where the text ends, 0 or more; 0: "
        "none are kept, so that training runs the target again",
    )
    seed: int = option(
        at_least(0),
        default=0,
        help="seed of the sampling, 0 or more; the same seed writes the same text on the same machine",
    )
    prompt_share: float = option(
        number(0, 1, "0 to 1"),
        default=0.5,
        help="share of the conversations that begin with one of the prompts, if there are any, 0 to 1",
    )
    opener_share: float = option(
        number(0, 1, "0 to 1"),
        default=0.75,
        help="share of the other conversations whose user begins with words like 'Write a', 0 to 1; the rest begins "
        "with nothing",
    )
