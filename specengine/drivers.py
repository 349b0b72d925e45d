"""The drivers of an engine: for its own policy, and for those that calls ask for instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from specengine import policies
from specengine.captured import CapturedDriver
from specengine.cycle import EagerDriver
from specengine.drafters import Drafter
from specengine.errors import InputError, shown
from specengine.models import Target
from specengine.policies import TreePolicy

PLAIN = "plain"


class Drivers(NamedTuple):
    """What runs the cycles of one policy: as they are called, and as graphs where the target is captured."""

    eager: EagerDriver
    captured: CapturedDriver | None

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> Drivers:
        """Of these parts; without a policy they decode plainly, and leave the draft alone."""
        if policy is None:
            drafter = None
        captured = CapturedDriver(cast(Any, target), drafter, policy) if target.captured else None
        return cls(EagerDriver(target, drafter, policy), captured)

    @property
    def drafter(self) -> Drafter | None:
        return self.eager.drafter

    @property
    def policy(self) -> TreePolicy | None:
        return self.eager.policy


class KeptDrivers:
    """An engine's drivers by policy, with what each policy has learnt and captured.

    Those of a policy's name and options are kept from the first call that asks for them, those of a TreePolicy until a
    call brings another one. A name and options that give what the engine was loaded with mean its own policy.
    """

    def __init__(self, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        self._target, self._drafter = target, drafter
        self._named: dict[tuple[str, ...], Drivers] = {}
        self._brought: Drivers | None = None
        self.own = self._of(policy)

    def use(self, policy: TreePolicy | None) -> None:
        """From now on this is the engine's own policy; None decodes plainly."""
        self.own = self._of(policy)

    def asked(self, policy: str | TreePolicy | None, options: Mapping[str, Any] | None = None) -> Drivers:
        """Those of a call's policy: a name, NAME/PRESET, `plain` or a TreePolicy; None is the engine's own.

        InputError for unknown names and options, and for any policy but `plain` where there is no draft.
        """
        options = options or {}
        if policy is None or policy == PLAIN:
            if options:
                raise InputError("policy_options: they need a policy given by name, other than plain")
            return self.own if policy is None else self._by_name(PLAIN, {})
        if self._drafter is None:
            raise InputError(f"policy: got {shown(policy)}, accepted plain: this engine was loaded without a draft")
        if isinstance(policy, str):
            return self._by_name(policy, options)
        return self._by_itself(policies.of(policy, options))

    def _by_name(self, name: str, options: Mapping[str, Any]) -> Drivers:
        # as text, as options may be given as text, and need not be hashable
        try:
            key = name, *(f"{option}={value}" for option, value in sorted(options.items()))
        except (RecursionError, ValueError) as error:
            raise InputError(f"policy_options: got {shown(options)}, which cannot be told from others") from error
        if key not in self._named:
            policy = None if name == PLAIN else policies.of(name, options)
            self._named[key] = self.own if policy == self.own.policy else self._of(policy)
        return self._named[key]

    def _by_itself(self, policy: TreePolicy) -> Drivers:
        if policy is self.own.policy:
            return self.own
        if self._brought is None or self._brought.policy is not policy:
            self._brought = self._of(policy)
        return self._brought

    def _of(self, policy: TreePolicy | None) -> Drivers:
        return Drivers.of(self._target, self._drafter, policy)
