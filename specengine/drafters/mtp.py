"""Drafting by the head for multi-token prediction that a model's checkpoint brings along, or by Gemma 4's assistant."""

from typing import Any

from specengine.drafters import Maker
from specengine.drafters.eagle import EagleDraft
from specengine.errors import require_options
from specengine.options import LoadOptions


class Mtp(EagleDraft):
    """The first MTP head of the target's own checkpoint (`mtp.*` of Qwen and Nemotron-H, DeepSeek's layer beyond all).

    Trees grow from it as from an EAGLE-1 head: the root's children are the head's own prediction, and each further
    level runs the same layer on its parent's state. Sources: DeepSeek-V3, section 2.2; Qwen3-Next.

    Or Gemma 4's assistant, given by its folder or Hub id, or loaded: a small model with the same recurrence, whose
    layers read the target's keys and values.
    """

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        if draft == "mtp":
            require_options(options.draft_options, (), "draft mtp: ")
            return lambda target, _: cls(
                checkpoints.mtp.load(target.name, target.lm), target.lm, name="mtp"
            )
        if not checkpoints.mtp.is_assistant(draft, offline=options.offline):
            return None
        require_options(options.draft_options, (), "draft assistant: ")
        return lambda target, _: cls(
            checkpoints.mtp.load_assistant(draft, target, offline=options.offline),
            target.lm,
            name="assistant",
        )
