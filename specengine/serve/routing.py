"""To which replica: the one that holds the beginning of the conversation, else the less busy of two."""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from specengine.serve.bodies import parsed
from specengine.serve.problems import Problem

MOST_CONVERSATIONS = 4096
BEGINNING = 256  # characters of a text without turns


def conversation_of(body: bytes) -> str | None:
    """What the requests of one conversation share, and hardly those of two; None where there is nothing to go by.

    Of messages: those up to the first of the user; of a text or of token ids: the beginning.
    """
    try:
        asked = parsed(body)
    except Problem:
        return None
    if not isinstance(asked, dict):
        return None
    messages, beginning = asked.get("messages"), asked.get("prompt")
    if isinstance(messages, list):
        users = [place for place, message in enumerate(messages) if _role(message) == "user"]
        beginning = messages[: users[0] + 1] if users else messages
    elif beginning is not None:
        beginning = beginning[:BEGINNING] if isinstance(beginning, str | list) else None
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest()[:32] if beginning else None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


class ConversationRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Where a conversation went last it goes again, as long as that replica takes another request."""

    def initialize_state(self, **options: Any) -> None:
        self._last: OrderedDict[str, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: of the first that has a replica with room, the least busy is taken."""
        last = self._last.get(_conversation(pending_request) or "")
        same = [replica for replica in candidate_replicas if replica.replica_id == last]
        return [same, random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if conversation := _conversation(pending_request):
            self._last[conversation] = replica_id
            self._last.move_to_end(conversation)
            if len(self._last) > MOST_CONVERSATIONS:
                self._last.popitem(last=False)


def _conversation(request: PendingRequest | None) -> str | None:
    return None if request is None else request.kwargs.get("conversation")
