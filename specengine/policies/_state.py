"""What a policy keeps from one pass to another: a module of policies, none itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class PerDevice(Generic[T]):
    """Tensors or a network, with a copy for each device that they were asked for on.

    A captured cycle goes on reading the memory of its device while another one runs on the host, so nothing moves.
    make: gives them on a device, on first use there.
    """

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make, self._copies = make, dict[torch.device, T]()

    def on(self, device: torch.device) -> T:
        if device not in self._copies:
            self._copies[device] = self._make(device)
        return self._copies[device]

    def copies(self) -> Iterable[T]:
        """All that were made, for those who change them in place."""
        return self._copies.values()
