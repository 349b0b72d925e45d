"""Drafting by an EAGLE head, which reads the target's hidden states."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

from specengine import registry
from specengine.checkpoints import embedded
from specengine.checkpoints.eagle import HeadOptions, head_folder, load_head
from specengine.drafters import Maker
from specengine.drafters._captured_eagle import CapturedEagle
from specengine.drafters._head_draft import HeadDraft
from specengine.drafters._native_eagle import NativeEagle
from specengine.errors import UnsupportedModelError
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.eagle_head import head_from, require_fit
from specengine.modeling.load_options import LoadOptions
from specengine.modeling.native import NativeLM


class Eagle(HeadDraft):
    """An EAGLE-1, -2 or -3 head, given by its folder or Hub id: one decoder layer over the target's hidden states."""

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions) -> Maker | None:
        if not isinstance(draft, str) or draft == embedded.NAME:
            return None
        folder = head_folder(draft, offline=options.offline)
        if folder is None:
            return None
        read = registry.build(HeadOptions, options.draft_options, "draft_options")
        return lambda target, _: cls.from_folder(folder, target.lm, read, pack=options.pack, graphs=options.graphs)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        target: CausalLM | NativeLM,
        options: HeadOptions,
        *,
        pack: bool | None = None,
        graphs: bool | None = None,
    ) -> HeadDraft:
        """The head in `folder`, in the target's dtype and on its device: captured, by the C++ forward, or as it is."""
        config, state, _ = load_head(folder, producer=cast(Any, options.producer), layer_ids=options.layer_ids)
        require_fit(config, target)
        if isinstance(target, NativeLM) and pack is None:
            with contextlib.suppress(UnsupportedModelError):  # torch runs heads of all kinds
                return NativeEagle(config, state, target, name=folder.name)
        head = head_from(config, state, target.dtype, target.device)
        return (CapturedEagle if graphs else cls)(head, target, name=folder.name, pack=pack)
