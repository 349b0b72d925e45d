"""Write training text without a data set: the target writes the user's turns and answers them.

A chat model that is prompted with the bare beginning of a user's turn continues like the users in its training data.
Its answers are the text that a draft has to predict. A base model continues a single random token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from specengine.errors import InputError
from specengine.train.text.conversations import Format, Writer, as_turns
from specengine.train.text.corpus import Corpus
from specengine.train.text.lockstep import Lockstep
from specengine.train.text.options import SynthesisOptions
from specengine.train.text.speculative import Speculative

if TYPE_CHECKING:
    from specengine.engine import Engine


def write_corpus(
    source: PreTrainedModel | Engine,
    tokenizer: Any,
    folder: Path,
    options: SynthesisOptions,
    *,
    name: str,
    prompts: Sequence[Sequence[str]] = (),
    part: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Let a model write training text into `folder` until it has `options.tokens` tokens.

    source: a model writes all conversations of a shard in lockstep; an engine (with this tokenizer) writes one at a
    time, as it answers its users.
    prompts: users' turns of conversations to mix in.
    part: (i, n), write only every n-th shard from the i-th on, and an n-th of the tokens, for n parallel calls.

    After an interruption, the same call resumes after the last complete shard and ends with the same text. Raise
    InputError if `folder` was begun with other settings.
    """
    index, parts = part
    if not 0 <= index < parts:
        raise InputError(f"part: got {index} of {parts}, accepted 0 to {parts - 1}")
    form = Format.of(tokenizer, stop_tokens(source, tokenizer))
    turn_ids = [ids for ids in (as_turns(turns, form, tokenizer) for turns in prompts) if len(ids[0]) < options.length]
    if prompts and not turn_ids:
        raise InputError(f"prompts: each is longer than the length of {options.length} tokens")
    if not form.chat and len(form.before) + 1 >= options.length:
        raise InputError(f"length: got {options.length}, but the beginning of a text has {len(form.before)} tokens")
    manifest: dict[str, Any] = {"target": name, "prompts": len(turn_ids)}
    if not isinstance(source, PreTrainedModel):
        manifest |= {"vocab_size": source.target.vocab_size, "writer": "engine"}
    else:
        manifest |= {"vocab_size": source.get_input_embeddings().weight.shape[0]}
    settings = {field: value for field, value in asdict(options).items() if field != "tokens"}  # a folder may grow
    corpus = Corpus.create(folder, manifest | settings)
    writer: Writer
    if not isinstance(source, PreTrainedModel):
        writer = Speculative(source, form, options)
    else:
        writer = Lockstep(source, form, options, tokenizer)
    number, have, began = index, 0, time.perf_counter()
    written = 0
    while have * parts < options.tokens:
        if not corpus.shard(number).is_file():
            texts = _written(writer, number, turn_ids, have, progress)
            corpus.add(number, texts)
            written += sum(len(text.tokens) for text in texts)
        have += sum(len(text.tokens) for text in corpus.read(number))
        rate = written / (time.perf_counter() - began)
        share = min(1.0, have * parts / options.tokens)
        progress(f"{have:,} tokens written ({share:.0%}), {rate:.0f} per second")
        number += parts
    return corpus


def _written(writer: Writer, number: int, turns: Any, have: int, progress: Callable[[str], None]) -> list[Any]:
    """Return the texts of a shard. Says when the first one begins, which takes longest, and where Ctrl-C came."""
    if not have:
        progress("Writing the first shard; a line follows each")
    try:
        return list(writer.write(number, turns))
    except KeyboardInterrupt:
        progress(f"Stopped at {have:,} tokens; the shard under way is lost, the others stay")
        raise


def stop_tokens(source: PreTrainedModel | Engine, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence, from the model's generation config and the tokenizer."""
    config = source.generation_config if isinstance(source, PreTrainedModel) else source.target.generation_config
    ends = config.eos_token_id if config else None
    ids = [ends] if isinstance(ends, int) else list(ends or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)
