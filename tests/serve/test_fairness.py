"""Whoever was served least goes first: into a lane, into memory, and with the rows of a prompt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from specengine.engine import Client, Pool, TextGeneration, Ticket
from specengine.engine.scheduler import PIECE, Scheduler
from specengine.models.native import NativeLane
from specengine.serve.worker import MAX_CLIENTS, Clients, Job, Worker
from tests.models.native_engines import needs_extension
from tests.serve.served import CHAT, Gate, served, until
from tests.serve.test_parallel import native_engine


def test_who_comes_back_has_no_claim_to_what_it_did_not_ask_for() -> None:
    clients = Clients()
    one, two = clients.of("one", []), clients.of("two", [])
    assert (one.served, two.served) == (0, 0)
    one.served, two.served = 100, 500
    assert clients.of("one", [one, two]) is one
    assert one.served == 100  # it asks already: its own count holds
    three = clients.of("three", [one, two])
    assert three.served == 100  # as the least served of those that ask
    assert clients.of("four", [two]).served == 500
    assert clients.of("five", []).served == 500
    assert clients.of("two", [three]).served == 500


def test_clients_are_forgotten_and_none_is_lifted_by_that() -> None:
    clients = Clients()
    busy = clients.of("busy", [])
    busy.served = 50
    for number in range(MAX_CLIENTS + 10):
        clients.of(number, [busy])
    assert len(clients._known) == MAX_CLIENTS
    assert clients.of("busy", [busy]) is not busy
    assert clients.of("new", [busy]).served == 50


def order_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    order: list[Any] = []
    answer = Worker._answer

    def noted(worker: Worker, engine: Any, job: Job, waited: float) -> Any:
        order.append(job.asked.request.user)
        return answer(worker, engine, job, waited)

    monkeypatch.setattr(Worker, "_answer", noted)
    return order


def asked_in_order(
    users: list[str | None], monkeypatch: pytest.MonkeyPatch, keys: list[str] | None = None
) -> list[Any]:
    """Return in which order a server answers requests that come in this order while the first is under way."""
    order, gate = order_of(monkeypatch), Gate()
    with served(lambda: gate.engine) as server, ThreadPoolExecutor(len(users)) as many:
        jobs = []
        for number, user in enumerate(users):
            headers = {} if keys is None else {"Authorization": f"Bearer {keys[number]}"}
            jobs.append(
                many.submit(server.post, CHAT | {"user": user, "max_tokens": 8}, headers=headers)
            )
            until(lambda: bool(order))
            until(lambda number=number: server.metric("num_requests_waiting") == number)
        gate.open.set()
        assert all(job.result().status_code == 200 for job in jobs)
    return order


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        (["a", "a", "a", "b"], ["a", "b", "a", "a"]),
        (["a", "a", "b", "a", "b", "c"], ["a", "b", "c", "a", "b", "a"]),
        ([None, None, None], [None, None, None]),
        (["a", "a", None], ["a", None, "a"]),
    ],
)
def test_who_was_served_least_gets_the_next_lane(
    users: list[str | None], expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked_in_order(users, monkeypatch)
    if users[2:3] == ["b"]:  # equal prompts and answers: a, b and c are even after a turn each
        assert found[:3] == expected[:3]
        assert sorted(found[3:]) == sorted(expected[3:])
    else:
        assert found == expected


def test_keys_tell_clients_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    users: list[str | None] = ["1", "1", "1", "1"]
    tickets: list[int] = []
    answer = Worker._answer

    def noted(worker: Worker, engine: Any, job: Job, waited: float) -> Any:
        tickets.append(job.ticket.number)
        return answer(worker, engine, job, waited)

    monkeypatch.setattr(Worker, "_answer", noted)
    asked_in_order(users, monkeypatch, ["x", "x", "x", "y"])
    first = tickets[0]
    assert [number - first for number in tickets] == [0, 3, 1, 2]


@needs_extension
def test_room_goes_to_who_was_served_least_and_others_wait_behind() -> None:
    engine = native_engine()
    room = NativeLane(engine.target).cache.bytes_of(3 + 60 + engine.drivers.own.eager.budget)
    pool = Pool(engine, 4, memory=room)  # for one
    placed: list[Any] = []
    make_room = pool._make_room

    def noted(own: Any, need: int) -> bool:
        if found := make_room(own, need):
            placed.append(own)
        return found

    pool._make_room = noted  # type: ignore[method-assign]
    first = pool.engines[0].stream([1, 2, 3], max_new_tokens=60, eos_token_id=[])
    next(first)
    threads = []
    for own, served_so_far in zip(pool.engines[1:], (300, 20, 100), strict=True):
        ticket = Ticket(Client(served_so_far))
        answer = TextGeneration(
            own, [4, 5, 6], {"max_new_tokens": 60, "eos_token_id": []}, ticket=ticket
        )
        threads.append(threading.Thread(target=lambda answer=answer: [*answer]))
        threads[-1].start()
        until(lambda: len(pool.waiting) == len(threads))
    first.close()
    for thread in threads:
        thread.join(20)
    assert [pool.engines.index(own) for own in placed] == [0, 2, 3, 1]
    assert not pool.waiting


class Prompt(NamedTuple):
    """A prompt with a piece to be run."""

    need: SimpleNamespace
    ticket: Ticket


def piece(rows: int, served_so_far: int) -> Any:
    return Prompt(SimpleNamespace(tokens=[0] * rows), Ticket(Client(served_so_far)))


def test_rows_of_prompts_go_to_who_was_served_least() -> None:
    target = SimpleNamespace(lm=None, device=torch.device("cpu"), running=None)
    choose = Scheduler(cast(Any, target))._pieces
    heavy, light, tail = (piece(*given) for given in ((PIECE, 900), (PIECE - 20, 10), (20, 950)))
    assert choose([heavy, light, tail], True) == [
        light,
        tail,
    ]  # what is left of the budget fits the last one
    assert choose([heavy], True) == [heavy]
    assert choose([heavy, light], False) == [light, heavy]  # they hold nobody up
    same = [piece(PIECE, 7) for _ in range(3)]
    assert choose([same[2], same[0], same[1]], True) == [
        same[0]
    ]  # the one that was asked for first


@needs_extension
def test_prompts_beside_an_answer_come_in_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The least served first, PIECE rows a forward for all of them; each answer is that given alone."""
    engine = native_engine(4096)
    pool, run = Pool(engine, 3), Scheduler._run
    prompts = [[(number * i + 3) % 250 for i in range(1500)] for number in (7, 11)]
    alone = [native_engine(4096).generate(prompt, max_new_tokens=4).token_ids for prompt in prompts]
    batches: list[list[tuple[int, int]]] = []  # served before, and rows

    def noted(scheduler: Scheduler, lanes: Any, pieces: Any, began: float) -> None:
        batches.append([(id(answer.ticket), len(answer.need.tokens)) for answer in pieces])
        run(scheduler, lanes, pieces, began)

    with pool.engines[0].stream([1, 2, 3], max_new_tokens=3900, eos_token_id=[]) as pieces:
        next(pieces)
        monkeypatch.setattr(Scheduler, "_run", noted)
        tickets = [Ticket(Client(count)) for count in (5000, 0)]
        answers = [
            TextGeneration(own, prompt, {"max_new_tokens": 4}, ticket=ticket)
            for own, prompt, ticket in zip(pool.engines[1:], prompts, tickets, strict=True)
        ]
        while not all(answer.is_ready for answer in answers):
            next(pieces)
        found = [answer.run().token_ids for answer in answers]
    assert found == alone
    counts = [sum(rows for _, rows in batch) for batch in batches]
    assert max(counts) <= PIECE
    owners = [owner for batch in batches for owner, _ in batch]
    light = id(tickets[1])
    last = max(place for place, owner in enumerate(owners) if owner == light)
    assert all(owner == light for owner in owners[: last + 1])
    assert owners.count(id(tickets[0])) > 20
