"""Drafting by a smaller causal language model: with the target's tokens, or translated from its own."""

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine import registry
from specengine.drafters import NO_HINTS, About, Hints, Maker, RowDraft, Step
from specengine.errors import (
    InputError,
    TokenizerMismatchError,
    UnsupportedModelError,
    did_you_mean,
    require_input,
    require_or,
    require_supported,
    restating,
)
from specengine.models import Target, common_prefix
from specengine.models.huggingface import CausalLM
from specengine.models.kv_cache import LanguageModel, Rows
from specengine.models.native import NativeLM, from_model
from specengine.models.refusals import NoTreesError
from specengine.ops import PassRows, TokenTree
from specengine.options import LoadOptions
from specengine.records import Cycle

_BLANKS = ("\u2581", "\u0120")  # as SentencePiece writes it, and as byte-level pieces do
_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")
_MARK = b"\xff\xfe\xfd"  # around the name of a special token, which no text writes
# a special token, a byte that belongs to no character, as Python's surrogate, or characters
_RUNS = re.compile(
    "\udcff\udcfe\udcfd.+?\udcff\udcfe\udcfd|[\udc80-\udcff]|[^\udc80-\udcff]+", re.DOTALL
)
TAIL = 16  # tokens at the end of a text that later bytes may change


def _byte_level(piece: str) -> bytes:
    return bytes(_LETTERS[letter] for letter in piece if letter in _LETTERS)


def _sentencepiece(piece: str) -> bytes:
    single = _SINGLE.fullmatch(piece)
    return bytes.fromhex(single[1]) if single else piece.replace(_BLANKS[0], " ").encode()


def written_by(tokenizer: Any, size: int) -> dict[int, bytes]:
    """Return the bytes that each token below `size` writes; special ones write their name between marks.

    TokenizerMismatchError for a tokenizer whose pieces do not say it.
    """
    vocabulary = tokenizer.get_vocab()
    require_or(
        TokenizerMismatchError,
        f"tokenizer {type(tokenizer).__name__}: its pieces do not say which bytes they write",
        not vocabulary.keys().isdisjoint(_BLANKS),
    )
    read = _sentencepiece if _BLANKS[0] in vocabulary else _byte_level
    marks = {
        id: _MARK if token.special else b"" for id, token in tokenizer.added_tokens_decoder.items()
    }
    return {
        id: marks[id] + name.encode() + marks[id] if id in marks else read(name)
        for id, name in sorted((id, name) for name, id in vocabulary.items() if id < size)
    }


def _joined(written: dict[int, bytes], tokens: list[int]) -> bytes:
    return b"".join(written.get(token, b"") for token in tokens)


class Alignment:
    """A target's text in a draft's tokens, and the tokens that both have: those that write the same bytes.

    target, draft  by token, the bytes that it writes, see `written_by`
    start          int list, the draft's tokens before any text
    own            int64 [size, the target's vocabulary], the draft's id of a token, or of its longest known ending
    columns        int64 [n], the draft's ids of tokens that both have; token_ids: int64 [n], the target's

    After Timor et al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies (arXiv 2502.05202), algorithm 4.
    """

    def __init__(
        self,
        target: dict[int, bytes],
        draft: dict[int, bytes],
        tokenizer: Any,
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.target, self.draft, self._tokenizer = target, draft, tokenizer
        self.start = list(tokenizer("", verbose=False)["input_ids"])
        # a byte's own token gives way to later ones that write it
        self._ids = {data: id for id, data in draft.items() if data}
        shared = {self._ids[data]: id for id, data in target.items() if data in self._ids}
        endings = (
            [data[at:] for at in range(len(data)) if data[at:] in self._ids]
            for data in (target.get(token, b"") for token in range(size))
        )
        draft_ids = [self._ids[longest[0]] if longest else 0 for longest in endings]
        self.own, self.columns, self.token_ids = (
            torch.tensor(ids, dtype=torch.int64, device=device)
            for ids in (draft_ids, [*shared], [*shared.values()])
        )
        # a line break first where the tokenizer puts a blank before a text
        self._before = "" if _joined(draft, self._read("a")) == b"a" else "\n"
        self._skipped = len(self._read(self._before))

    def encode(self, data: bytes) -> list[int]:
        """Return the draft's tokens that write these bytes, which need not be whole characters."""
        ids = list[int]()
        for run in _RUNS.findall(data.decode(errors="surrogateescape")):
            whole = self._ids.get(run.encode(errors="surrogateescape"))
            text = self._before + run.encode(errors="ignore").decode()
            ids += self._read(text)[self._skipped :] if whole is None else [whole]
        return ids

    def extended(self, ids: list[int], tokens: list[int], firm: int = 0) -> list[int]:
        """Return a text in the draft's tokens, `ids`, with tokens of the target after it.

        Of `ids` the last TAIL may change, those after a blank, and none of the first `firm`.
        """
        first = max(firm, len(self.start), len(ids) - TAIL)
        end = next(
            (at for at in range(first, len(ids)) if self.draft.get(ids[at], b"")[:1].isspace()),
            first,
        )
        return [
            *ids[:end],
            *self.encode(_joined(self.draft, ids[end:]) + _joined(self.target, tokens)),
        ]

    def _read(self, text: str) -> list[int]:
        return self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]


class SmallModel(RowDraft):
    """Any causal LM as the draft, given by its id or path, or loaded.

    Tokens that were committed are run with the next root, whether or not they have been drafted from: that costs rows
    of a pass that is made anyway.

    vocab_size: the target's; logits of padding rows beyond the smaller of both vocabularies are cut off.
    captured: UnsupportedModelError where its passes cannot be captured; merge: see CausalLM.

    alignment: of its tokens with a target's other ones. It then reads the text in its own tokens, tokenised anew only
    at its end, and proposes those that are shared, by its own distribution over them.
    """

    about = About(lookup=True, takes_any_model=True)

    def __init__(
        self,
        model: PreTrainedModel | NativeLM,
        vocab_size: int | None = None,
        *,
        pack: bool | None = None,
        captured: bool = False,
        merge: bool = False,
        alignment: Alignment | None = None,
    ) -> None:
        native = isinstance(model, NativeLM)
        try:
            self.lm: LanguageModel = model if native else CausalLM(model, pack=pack, merge=merge)
            require_or(
                NoTreesError,
                f"{model.config.model_type}: recurrent states on transformers' modules serve a target, no draft",
                not getattr(self.lm, "recurrent", False),
            )
        except NoTreesError as refused:
            # the native forward keeps the states of recurrent layers by node
            try:
                self.lm = from_model(model)
            except UnsupportedModelError:
                raise refused from None
        self._alignment = alignment
        self.token_ids = None if alignment is None else alignment.token_ids
        if captured and isinstance(self.lm, CausalLM):
            self.lm.require_capture()
        self.name = f"small_model ({model.name if native else model.config._name_or_path or type(model).__name__})"
        self.vocab_size = min(self.lm.vocab_size, vocab_size or self.lm.vocab_size)
        self._columns: Any = slice(self.vocab_size) if alignment is None else alignment.columns
        self._version = self.lm.version
        super().__init__(self.lm.new_cache(1))

    def __copy__(self) -> "SmallModel":
        draft = object.__new__(type(self))
        draft.__dict__.update(self.__dict__)
        RowDraft.__init__(draft, self.lm.new_cache(1))
        return draft

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        embedded = checkpoints.embedded
        if not isinstance(draft, str | PreTrainedModel):
            return None
        require_input(
            f"draft_options: accepted for EAGLE heads alone; draft {draft!r} is a small model",
            not options.draft_options,
        )
        if isinstance(draft, str) and draft != embedded.NAME:
            missing = checkpoints.checks.why_absent(draft, offline=options.offline)
            if missing is not None:
                embedded_names = _names(embedded.HEAD)
                raise InputError(
                    f"draft: got {draft!r}, accepted {', '.join(embedded_names)}, a path or a Hub id; {missing}"
                    f"{did_you_mean(draft, embedded_names)}"
                )
        return lambda target, tokenizer: cls.from_model(
            draft, target, tokenizer, options, checkpoints
        )

    @classmethod
    def from_model(
        cls,
        draft: str | PreTrainedModel,
        target: Target,
        tokenizer: Any,
        options: LoadOptions,
        checkpoints: Any,
    ) -> "SmallModel":
        """Load a model on the target's device, aligned with the target where their tokenizers differ.

        Raises InputError or TokenizerMismatchError if it does not fit.
        """
        loaded = dataclasses.replace(
            options,
            device=target.device,
            quantize=None,
            numerics="auto",
            # native where it can
            backend=options.backend if options.backend == "huggingface" else None,
        )
        model, own_tokenizer, _, is_own = checkpoints.pretrained.load_model(draft, loaded)
        require_input(
            f"draft: the model is on {model.device}, accepted {target.device}, the target's device",
            torch.device(model.device) == target.device,
        )
        vocabulary = (
            model.vocab_size
            if isinstance(model, NativeLM)
            else model.get_input_embeddings().weight.shape[0]
        )
        alignment = None
        if tokenizer is None or own_tokenizer is None:
            require_input(
                f"draft: the vocabulary has {vocabulary} entries, the target's {target.vocab_size}; "
                "both must be equal without two tokenizers to compare",
                vocabulary == target.vocab_size,
            )
        elif own_tokenizer.get_vocab() != tokenizer.get_vocab():
            require_supported(
                "draft: its tokenizer is another one than the target's; accepted with graphs=False",
                not target.captured,
            )
            alignment = Alignment(
                written_by(tokenizer, target.vocab_size),
                written_by(own_tokenizer, vocabulary),
                own_tokenizer,
                target.vocab_size,
                target.device,
            )
        with restating(
            UnsupportedModelError, lambda error: UnsupportedModelError(f"draft: {error}")
        ):
            return cls(
                model,
                target.vocab_size,
                pack=options.pack,
                captured=target.captured,
                merge=is_own,
                alignment=alignment,
            )

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    @property
    def weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.lm.model,)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self.lm.refresh()
        if self.lm.version != self._version:
            self.reset()
            self._version = self.lm.version
        if self._alignment is not None:
            prompt = self._alignment.extended(self._alignment.start, prompt)
            self._committed: list[int] = []  # of the answer, by the target's ids, the root excluded
            self._taken_in = 0  # of these and the root
        self.cache.crop(min(common_prefix(self._tokens, prompt), self.cache.length))
        self._tokens = list(prompt)
        self.taken.fill_(1)  # the root
        self._put_off(prompt[self.cache.length :], [], hints)

    def _extend(self, tokens: list[int], features: list[Tensor]) -> None:
        self.lm.extend(
            self.cache, [min(token, self.lm.vocab_size - 1) for token in tokens], logits="none"
        )

    def root(self, tree: TokenTree) -> Step:
        """Run the pass, with other tokens than the target's over what the text has become with the root."""
        if self._alignment is not None:
            self.settle()
            tokens = [*self._committed, int(tree.tokens[0])]
            firm = self.cache.length if self.cache.states else 0  # as states cannot go back
            ids = self._alignment.extended(self._tokens, tokens[self._taken_in :], firm)
            self.cache.crop(min(common_prefix(self._tokens, ids), self.cache.length))
            rest = ids[self.cache.length :]
            self.reserve(len(ids), tree.capacity, len(rest))
            self._held[1 : len(rest) + 1] = torch.tensor(rest, dtype=torch.int64, device="cpu")
            self.taken.fill_(len(rest))
            self._tokens, self._taken_in = ids, len(tokens)
        return super().root(tree)

    def accept(self, cycle: Cycle) -> None:
        if self._alignment is None:
            super().accept(cycle)
        else:
            self._committed += [int(cycle.tree.tokens[0]), *cycle.tokens[: len(cycle.path) - 1]]

    def _run(self, rows: Rows, pass_rows: PassRows, shared: Any = None) -> tuple[Tensor, None]:
        if self._alignment is not None:
            rows.tokens = (
                self._alignment.own[rows.tokens]
                if pass_rows.one is None  # else all but the root are the draft's tokens already
                else rows.tokens.index_fill(0, pass_rows.one, self._tokens[-1])
            )
        # A target with a larger, padded vocabulary may commit an id that is unknown here; any other will do for it.
        rows.tokens = rows.tokens.clamp(max=self.lm.vocab_size - 1)
        logits, _ = self.lm.forward(rows, self.cache, one=pass_rows.one)
        return logits[:, self._columns], None


def _names(head: str) -> list[str]:
    """Return the drafts that go by a name of their own, plug-ins included."""
    package = "specengine.drafters"
    return [
        *(
            name
            for name in registry.names(package)
            if name not in ("dflash", "eagle", "lookup", "small_model")
        ),
        *sorted(registry.plugins(package)),
        "none",
        head,
    ]
