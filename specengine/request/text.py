"""Token ids as text: whole, and as it grows."""

import copy
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

UNKNOWN_LOOKBACK = 32  # characters, for decoders whose rules cannot be read
CLEAN_UP_LOOKBACK = 16  # characters: " n ' t" becomes "n't", and the blank before it goes
# a panic of the `tokenizers` library is no Exception either
ENDS = KeyboardInterrupt, SystemExit, GeneratorExit
CLEAN_UP = "clean_up_tokenization_spaces"
FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
APPENDING = (
    "transformers.tokenization_utils_sentencepiece",
    "transformers.tokenization_mistral_common",
)


class Decoder:
    """Decode token ids to text, without special tokens other than those of `shown`.

    Never raises: an id that the tokenizer has no text for, or raises an error for, writes nothing, and without a
    tokenizer no id writes anything. special: whether all special tokens are shown.
    """

    def __init__(
        self, tokenizer: Any, shown: Collection[int] = (), *, special: bool = False, **options: Any
    ) -> None:
        """options: further ones of the tokenizer's `decode`."""
        self.tokenizer, self.shown = tokenizer, frozenset(shown)
        self._options = (
            {"skip_special_tokens": not special, **options} if _takes_options(tokenizer) else {}
        )
        self._without_text: set[int] = set()
        self._bytes: dict[int, bool] = {}

    def __call__(self, tokens: list[int], **changes: Any) -> str:
        """Return the text of tokens, without those that have none; changes: of the tokenizer's options.

        A tokenizer is somebody else's program: what raises, or gives anything but text, is left out.
        """
        if self.tokenizer is None or not tokens:
            return ""
        if not changes and not self.shown.isdisjoint(tokens):
            return self._with_shown(tokens)
        if self._without_text:
            tokens = [token for token in tokens if token not in self._without_text]
        try:
            options = self._options | changes if self._options else {}
            if isinstance(text := self.tokenizer.decode(tokens, **options), str):
                return text
        except ENDS:
            raise
        except BaseException:  # looked into below
            pass
        if len(tokens) == 1:
            self._without_text.update(tokens)
            return ""
        before = len(self._without_text)
        texts = [self([token], **changes) for token in tokens]
        return self(tokens, **changes) if len(self._without_text) > before else "".join(texts)

    def _with_shown(self, tokens: list[int]) -> str:
        parts, start = [], 0
        for at, token in enumerate(tokens):
            if token in self.shown:
                parts += [self(tokens[start:at]), self([token], skip_special_tokens=False)]
                start = at + 1
        return "".join(parts) + self(tokens[start:])

    @property
    def lookback(self) -> int:
        """Return how many characters at a text's end later tokens may rewrite; 0 if they only append to it."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return _lookback_of(tokenizer)
        names = "decode", "_decode", "clean_up_tokenization"
        if all(
            _function(tokenizer, name) is getattr(PreTrainedTokenizerFast, name) for name in names
        ):
            core = tokenizer.backend_tokenizer
            cleans = self._options.get(CLEAN_UP, tokenizer.clean_up_tokenization_spaces)
            ignores = type(core.model).__name__ == "BPE" and not getattr(
                tokenizer, FORCED_CLEAN_UP, False
            )
            return _lookback_of(core) + (CLEAN_UP_LOOKBACK if cleans and not ignores else 0)
        module = getattr(_function(tokenizer, "convert_tokens_to_string"), "__module__", None)
        return 0 if tokenizer is None or module in APPENDING else UNKNOWN_LOOKBACK

    def is_byte(self, token: int) -> bool:
        """Return whether it is a byte of SentencePiece: in a run of them a later one may change the run's text."""
        if token not in self._bytes:
            name = self.name(token)
            self._bytes[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return self._bytes[token]

    def specials_in(self, strings: Collection[str]) -> frozenset[int]:
        """Return the special tokens, hidden in the text, whose own text stands in one of these strings."""
        texts = special_texts(self.tokenizer).items() if strings else ()
        specials = {
            token for token, text in texts if text and any(text in string for string in strings)
        }
        return frozenset(specials - self.shown)

    def name(self, token: int) -> Any:
        """Return the tokenizer's own name of a token; None if it has none."""
        try:
            return self.tokenizer.convert_ids_to_tokens(token)
        except Exception:  # there is no such method, or no such token
            return None


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


READS = "encode", "apply_chat_template"  # of a tokenizer, besides calls


class SharedTokenizer:
    """Share a tokenizer between threads: one copy reads, a text at a time, and another one does all else.

    Reading sets the copy anew for each text, so nobody else may use it meanwhile. Copies are made when needed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._given, self._reads, self._copies_alone = tokenizer, threading.Lock(), threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any) -> "SharedTokenizer | None":
        """Return a tokenizer, which may be None, for several threads."""
        return (
            None
            if tokenizer is None
            else (_SharedCallable if callable(tokenizer) else cls)(tokenizer)
        )

    @functools.cached_property
    def _copies(self) -> tuple[Any, Any]:
        with self._copies_alone:
            return vars(self).get("_copies") or (
                copy.deepcopy(self._given),
                copy.deepcopy(self._given),
            )

    def read(self, name: str, *given: Any, **options: Any) -> Any:
        with self._reads:
            return getattr(self._copies[0], name)(*given, **options)

    @property
    def kind(self) -> type[Any]:
        return type(self._given)

    def ready(self) -> None:
        """Make the copies now."""
        _ = self._copies

    def __reduce__(self) -> Any:  # a copy of it is one of the tokenizer
        return copy.copy, (self._given,)

    def __len__(self) -> int:
        return len(self._copies[1])

    def __getattr__(self, name: str) -> Any:
        return (
            functools.partial(self.read, name) if name in READS else getattr(self._copies[1], name)
        )


class _SharedCallable(SharedTokenizer):
    __call__ = functools.partialmethod(SharedTokenizer.read, "__call__")


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the text of each token that the tokenizer leaves out of its texts."""
    named = (
        getattr(tokenizer, name, None) or () for name in ("all_special_ids", "all_special_tokens")
    )
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {
        token: item.content for token, item in added.items() if getattr(item, "special", False)
    }
    return dict(zip(*named, strict=False)) | special


def _takes_options(tokenizer: Any) -> bool:
    """Return whether its `decode` knows transformers' options."""
    try:
        parameters = inspect.signature(tokenizer.decode).parameters
    except (AttributeError, TypeError, ValueError):  # none, or of a kind that does not say
        return tokenizer is not None
    return "skip_special_tokens" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _function(tokenizer: Any, name: str) -> Any:
    """Return the function of a tokenizer's method; None if it has no such method."""
    return getattr(getattr(tokenizer, name, None), "__func__", None)


def _lookback_of(core: Tokenizer) -> int:
    """Return the lookback of the decoder of a tokenizer of the `tokenizers` library.

    Its parts work on one token at a time, and on the whole text after a part that fuses the tokens.
    """
    try:
        steps: list[Any] = (
            [{"type": "Fuse"}]
            if core.decoder is None
            else [json.loads(core.decoder.__getstate__())]
        )
    except Exception:  # a decoder written in Python
        return UNKNOWN_LOOKBACK
    lookback, fused = 0, False
    while steps:
        step = steps.pop(0)
        kind = step["type"]
        if kind == "Sequence":
            steps = [*step["decoders"], *steps]
        elif kind == "Replace" and fused:
            pattern = step["pattern"].get("String")
            reach = UNKNOWN_LOOKBACK if pattern is None else len(pattern)
            lookback = (lookback + reach) * max(1, len(step["content"]))
        elif kind in ("WordPiece", "CTC") and fused:
            lookback += CLEAN_UP_LOOKBACK
        elif kind not in KINDS:
            lookback += UNKNOWN_LOOKBACK
        fused = fused or kind in ("Fuse", "ByteLevel")
    return lookback


KINDS = (
    "BPEDecoder",
    "ByteFallback",
    "ByteLevel",
    "CTC",
    "Fuse",
    "Metaspace",
    "Replace",
    "Strip",
    "WordPiece",
)

HELD_BACK_LIMIT = 256  # tokens
CONTEXT_LIMIT = 64  # tokens, where they write blanks alone
REWRITTEN_LIMIT = 512  # tokens that are decoded again while their text may be rewritten


class TextStream:
    """Decode a growing list of tokens piece by piece; the pieces add up to the decoded whole.

    Tokens that write nothing are left out, wherever they are. Text is held back from a replacement character at its end
    on, as the next bytes may complete a character, and from the beginning of a run of SentencePiece's bytes to its end:
    over at most HELD_BACK_LIMIT tokens, which no text needs. The characters that later tokens may rewrite, of which a
    Decoder tells the number, are held back too.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """decode: a Decoder, or any function."""
        self.decode = decode
        self._lookback: int = getattr(decode, "lookback", 0)
        self._is_byte: Callable[[int], bool] = getattr(decode, "is_byte", lambda token: False)
        # settled ones as context, since spaces depend on it, then those not settled
        self._tokens: list[int] = []
        self._end = 0  # of the settled ones
        self._sent = ""  # of the text of all these, the part that was returned
        self._writes: dict[int, bool] = {}
        self._visible: int | None = None  # a token that writes more than blanks

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        before, written = len(self._tokens), self._writes
        for token in tokens:
            if written[token] if token in written else self._is_written(token):
                self._tokens.append(token)
        count = stable = len(self._tokens)
        if count == before:
            return ""
        if waiting := count - self._end < HELD_BACK_LIMIT:
            while stable > self._end and self._is_byte(self._tokens[stable - 1]):
                stable -= 1
            if stable == self._end:
                return ""
        now = self.decode(self._tokens[:stable])
        settled = now.rstrip("\N{REPLACEMENT CHARACTER}") if waiting else now
        if self._lookback:
            return self._firm(now, settled, stable)
        piece = settled[len(self._sent) :]
        if settled == now:
            self._settle(now, stable)
        else:
            self._sent += piece
        return piece

    @property
    def rest(self) -> str:
        """The text that is held back, as it is if no token follows."""
        waits = self._lookback or len(self._tokens) > self._end
        return self.decode(self._tokens)[len(self._sent) :] if waits else ""

    def _settle(self, text: str, end: int) -> None:
        """Settle the first `end` tokens, whose text was returned. The last ones stay as context, if they suffice."""
        context = self.decode(self._tokens[self._end : end])
        if context.strip() or end > CONTEXT_LIMIT:
            del self._tokens[: self._end]
            text, end = context, end - self._end
        self._sent, self._end = text, end

    def _firm(self, text: str, settled: str, end: int) -> str:
        """Return the text that later tokens cannot rewrite. Of many tokens, drop the first ones if it stays the same.

        text: of the first `end` tokens; settled: without its uncertain end.
        """
        piece = settled[len(self._sent) : max(len(text) - self._lookback, 0)]
        self._sent += piece
        if settled != text:
            return piece
        self._end = end
        dropped = end // 2
        if end > REWRITTEN_LIMIT:
            tail = self.decode(self._tokens[dropped:end])
            waits = len(text) - len(self._sent)
            compared = waits + self._lookback
            if text[-compared:] == tail[-compared:]:
                del self._tokens[:dropped]
                self._sent, self._end = tail[: len(tail) - waits], end - dropped
        return piece

    def _is_written(self, token: int) -> bool:
        """Return whether a new token writes anything between others, as does a blank that is left out at the start."""
        alone = self.decode([token])
        if not alone:
            if (letter := self._visible) is None:
                return True  # to be seen later; at the beginning it stands in nobody's way
            self._writes[token] = self.decode([letter, token, letter]) != self.decode(
                [letter, letter]
            )
            return self._writes[token]
        if (
            self._visible is None
            and alone.strip()
            and token not in getattr(self.decode, "shown", ())
        ):
            self._visible = token
        self._writes[token] = True
        return True
