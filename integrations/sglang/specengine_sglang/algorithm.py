"""The algorithm as SGLang's scheduler and model runner see it: EAGLE-3, except where that has needs of its own."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo


class PolicyAlgorithm(CustomSpecAlgo):
    """CustomSpecAlgo answers for an algorithm of its own kind; this one runs SGLang's EAGLE worker."""

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return True

    def get_platform_worker_cls(self) -> None:
        """Return None: no platform has a replacement for it."""

    def handle_server_args(self, server_args: Any) -> None:
        SpeculativeAlgorithm.EAGLE3.handle_server_args(server_args)

    def create_future_map(self, device: Any, *rest: Any, **named: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *rest, **named)
