"""Options of loading models, each declared once where its field is: how it is checked, its flag and its help.

Imports neither torch nor transformers, because the command line's help reads it.
"""

# ruff: noqa: RUF009 (option returns dataclasses.field)

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from specengine.errors import (
    MAYBE,
    NAMES,
    TRUTH,
    Checked,
    InputError,
    one_of,
    option,
    reader,
    require_input,
    require_options,
    restating,
    shown,
    whole,
)
from specengine.registry import is_array, plain

DTYPES = ("auto", "bfloat16", "float16", "float32")
BACKENDS = ("native", "huggingface")
QUANTIZATIONS = ("int8",)
NUMERICS = ("auto", "bfloat16", "float32", "integer")  # of a native model's products
DEVICES = ("cpu", "cuda", "mps", "xpu")


def _is_dtype(value: Any) -> bool:
    import torch

    return value is None or value in DTYPES or isinstance(value, torch.dtype)


def _is_folder(value: Any) -> bool:
    return isinstance(value, os.PathLike | str)


@dataclass
class LoadOptions(Checked):
    """Options of loading models.

    dtype              auto (as stored), bfloat16, float16, float32 or a torch.dtype
    device             cpu, cuda, cuda:N, mps or xpu; by default cuda where there is one, and the target's for a draft
    tokenizer          a tokenizer of transformers, or the path or Hub id of one; by default that of the target's name
    draft_options      options of a draft given by name or path
    policy_options     options of a policy given by name
    offline            never use a network
    trust_remote_code  run modeling code from a model's repository
    lookup             mix into a head's or smaller model's distributions what followed the same words before in prompt
                       and answer (drafters/lookup.py); by default on a CPU without graphs; a Drafter is taken as it is
    backend            what runs models of the Llama family on a CPU: `native`, the C++ forward, or `huggingface`, the
                       model's own modules, which run everything else as well; None takes native where it can
    quantize           `int8` keeps linear weights as int8 with a scale per output: half the memory of bfloat16, other
                       rounding; of native models, and on a CUDA device of models given by name
    numerics           how a native model's products are computed: `integer` multiplies int8 weights and packed GGUF
                       blocks by int8 activations, with the same bits on every instruction set; `bfloat16` and `float32`
                       name the model's dtype and multiply floats; auto takes integer for such weights where the machine
                       has no AMX, and has AVX2 or NEON
    pack               run bfloat16 linear layers on a CPU with a second, packed copy of their weights: faster, bit for
                       bit the same; by default where half of the free memory has room for it
    graphs             run target and draft as CUDA graphs, captured on first use (Engine.warmup captures all at
                       once); None is True on a CUDA device where model and draft can, and False elsewhere;
                       without a CUDA device the same padded forwards run uncaptured, which only tests have a use for
    tp_plan            `auto` splits the target over the processes that torchrun started, by the plan that transformers
                       has for it; rank 0 drafts, and the others do not return from loading
    strict             verify so that a token's logits have the same bits in every tree and in plain decoding: then half
                       precision is as exact as float32; costs more per node
    context            tokens of prompt and answer that a text may have; by default as the model's config says
                       (max_position_embeddings, or what scaled positions reach)
    learn              a folder to keep prompts and answers in as token ids; an EAGLE head drafts by what `specengine
                       train learn` has made of it there, without graphs
    memory             where up to 64 MB of texts of requests are kept that later drafts copy from: `off` (default),
                       `process`, `disk` (the cache folder), or a folder
    memory_from        a JSONL file, or a folder of text files such as a repository, to begin the memory with
    progress           called with lines about what takes long; by default they go to stderr
    """

    dtype: Any = option(
        reader(f"{', '.join(DTYPES)} or a torch.dtype", _is_dtype),
        choices=DTYPES,
        default="auto",
        help="data type of the weights (default: auto, as stored)",
    )
    device: Any = option(help="cpu, cuda, cuda:N, mps or xpu (default: cuda where there is one)")
    tokenizer: Any = option(
        reader(
            "a tokenizer of transformers, or a path or Hub id of one",
            lambda value: _is_folder(value) or (callable(value) and hasattr(value, "decode")),
        )
    )
    draft_options: dict[str, Any] = option(
        NAMES, default=dict, help="option of the draft; repeatable", flag="draft-option"
    )
    policy_options: dict[str, Any] = option(
        NAMES,
        default=dict,
        help="option of the policy named by --policy, repeatable; `specengine doctor --inspect` lists them",
        flag="policy-option",
    )
    offline: bool = option(TRUTH, default=False, one_way=True, help="never use a network")
    trust_remote_code: bool = option(
        TRUTH, default=False, one_way=True, help="run code from the model's repository"
    )
    lookup: bool | None = option(
        MAYBE,
        help="add tokens to the draft that followed the same words in prompt and answer before (default: on a CPU)",
    )
    backend: str | None = option(
        one_of(BACKENDS, more=" or none"),
        choices=BACKENDS,
        help="native: the C++ forward, on a CPU; huggingface: its own modules (default: native where it can)",
    )
    quantize: str | None = option(
        one_of(QUANTIZATIONS, more=" or none"),
        choices=QUANTIZATIONS,
        help="keep weights as int8, half the memory of bfloat16 (natively, or on CUDA)",
    )
    numerics: str = option(
        one_of(NUMERICS),
        choices=NUMERICS,
        default="auto",
        help="of a native model's products; integer: int8 weights and packed blocks by int8 activations "
        "(default: auto, integer for such weights on a CPU without AMX)",
    )
    pack: bool | None = option(
        MAYBE,
        help="on a CPU, keep a second copy of bfloat16 weights that is faster (default: where it helps and fits)",
    )
    graphs: bool | None = option(
        MAYBE,
        help="run target and draft as CUDA graphs, captured once (default: on a CUDA device, where "
        "model and draft can)",
    )
    tp_plan: str | None = option(
        one_of(("auto",), more=" or none"),
        choices=("auto",),
        help="split the model over the processes that torchrun started, by its own plan (default: under torchrun)",
    )
    strict: bool = option(
        TRUTH,
        default=False,
        help="compute the same bits in every tree as in plain decoding, also in bfloat16; costs more per node",
    )
    context: int | None = option(
        whole(2, accepted="a whole number of tokens, 2 or more, or none"),
        help="tokens of prompt and answer that a text may have (default: as the model's config says)",
        metavar="N",
    )
    learn: Any = option(
        reader("a folder or none", _is_folder, Path),
        help="keep prompts and answers in this folder as token ids, and let the draft's head learn from them while "
        "nothing is asked; answers stay the same (default: nothing is kept)",
        metavar="DIR",
    )
    memory: Any = option(
        reader("off, process, disk, a folder or none", _is_folder, str),
        help="where texts are kept for drafts to copy from later: off, process (default), disk (the cache folder) or "
        "a folder",
        metavar="DIR",
    )
    memory_from: Any = option(
        reader("a JSONL file, a folder or none", _is_folder, str),
        help="texts that drafts copy from at once: a JSONL file, or a folder",
        metavar="PATH",
    )
    progress: Callable[[str], None] | None = option(reader("a callable or none", callable))

    @classmethod
    def names(cls) -> list[str]:
        return [item.name for item in fields(cls)]

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        import torch

        require_options(options, cls.names())
        self = cls(
            **{name: plain(value) if is_array(value) else value for name, value in options.items()}
        )
        if self.dtype not in (None, "auto") and not isinstance(self.dtype, torch.dtype):
            self.dtype = getattr(torch, self.dtype)
        self.dtype = self.dtype or "auto"
        others = {
            **{name: getattr(self, name) for name in ("quantize", "pack", "graphs", "device")},
            "backend": self.backend == "native",
            "numerics": self.numerics != "auto",
        }
        alone = [name for name, value in others.items() if value and self.tp_plan is not None]
        require_input(
            f"tp_plan: got {', '.join(alone)} too, which are for a model in one process", not alone
        )
        if self.device is not None:
            refusal = f"device: got {shown(self.device)}, accepted cpu, cuda, cuda:N, mps or xpu"
            with restating((RuntimeError, TypeError), lambda _: InputError(refusal)):
                self.device = torch.device(self.device)
            kind = self.device.type
            require_input(refusal, kind in DEVICES)
            present = {
                "cuda": torch.cuda.is_available(),
                "mps": torch.backends.mps.is_available(),
                "xpu": torch.xpu.is_available(),
            }
            require_input(
                f"device: {kind} was asked for, but torch sees no "
                f"{'CUDA' if kind == 'cuda' else 'such'} device",
                present.get(kind, True),
            )
        return self
