"""The two halves of handoffs against a real daemon: engines of one process that read each other's memory."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvclient import BlockPool, ClientSettings, HandoffChoice, PeerUnavailableError
from kvclient.sync import KvClient
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.device import HostMemory
from kvplugins.vllm.plan import BlockWork, HandoffWork
from kvplugins.vllm.scheduler_handoffs import LinkedHandoffs
from kvplugins.vllm.ticket import Ticket
from kvplugins.vllm.worker_handoffs import LendingService, WorkerHandoffs, lending_opener
from kvplugins.vllm.worker_side import WorkerLimits, WorkerSide
from kvservice.transports.inproc_memory import InprocMemoryHub
from tests.integration.daemon_process import DaemonProcess, identity, parts, until
from tests.plugins.fakes import FakeClock, keys

BLOCKS = 32
PIECE_BYTES = 4096
TIMEOUT_S = 10.0
RETRY_S = 0.02


class Rank:
    """A worker: its memory, and its sessions."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.layers = [np.zeros((BLOCKS, PIECE_BYTES), np.uint8) for _ in range(2)]
        memory = HostMemory(self.layers, BlockPool.of(self.layers))
        one_part = [engine.parts[number]]
        self.link: ServiceLink[LendingService] = engine.link(
            lending_opener(engine.opener(one_part), memory.pool, lends=True)
        )
        self.handoffs = WorkerHandoffs(link=self.link, pool=memory.pool, rank=number, is_host=True)
        self.side = WorkerSide(
            link=engine.link(engine.opener(one_part)),
            memory=memory,
            limits=WorkerLimits(16, 16, TIMEOUT_S, TIMEOUT_S),
            saves=True,
            handoffs=self.handoffs,
            clock=time.monotonic,
        )
        engine.stack.callback(self.side.shutdown)

    def fill(self, block_ids: list[int], start: int) -> None:
        """Write other bytes into each block and layer."""
        for number in block_ids:
            for depth, layer in enumerate(self.layers):
                layer[number] = (start + 2 * number + depth) % 251

    def bytes_of(self, block_ids: list[int]) -> bytes:
        """Return the bytes of blocks."""
        return b"".join(layer[number].tobytes() for number in block_ids for layer in self.layers)

    def load(self, *works: BlockWork) -> set[int]:
        """Load; return the blocks that were lost."""
        self.side.start_loads(works)
        ended: set[str] = set()

        def have_ended() -> bool:
            ended.update(self.side.take_ended())
            return len(ended) == len(works)

        until(have_ended, "the loads end")
        return self.side.take_lost_block_ids()


class Engine:
    """An engine with its scheduler's session and its ranks."""

    def __init__(self, world: World, *, ranks: int = 1, wants_direct: bool = True) -> None:
        self.world = world
        self.stack = world.stack
        self.incarnation = os.urandom(16)
        self.parts = parts(*[2 * PIECE_BYTES] * ranks)
        self.clock = FakeClock()
        self.ranks = [Rank(self, number) for number in range(ranks)]
        self.scheduler_link: ServiceLink[Service] = self.link(self.opener(self.parts))
        self.stack.callback(self.scheduler_link.close)
        self.handoffs = LinkedHandoffs(
            self.scheduler_link,
            part_of_ranks=range(ranks),
            wants_direct=wants_direct,
            wait_s=TIMEOUT_S,
            clock=self.clock,
        )
        self.learn()

    @property
    def rank(self) -> Rank:
        """The first rank."""
        return self.ranks[0]

    def learn(self) -> None:
        """Let the scheduler know what its workers lend."""
        lent = {rank.handoffs.rank: rank.handoffs.current() for rank in self.ranks}
        self.handoffs.learn({number: each for number, each in lent.items() if each is not None})

    def opener(self, some: list[Any]) -> Any:
        """Return what opens a session whose process can read the others' memory."""
        settings = ClientSettings(
            self.world.daemon.lane, engine_incarnation=self.incarnation, checksums=False
        )

        def open_service() -> Service:
            client = KvClient.connect(settings, endpoint=self.world.hub.endpoint())
            by_part = tuple(client.open_namespace(identity(), [part], salt=self.world.salt) for part in some)
            whole = client.open_namespace(identity(), some, salt=self.world.salt)
            return Service(client, whole, by_part)

        return open_service

    def link(self, connect: Any) -> ServiceLink[Any]:
        """Return a link that is connected."""
        made: ServiceLink[Any] = ServiceLink(
            name="the daemon",
            connect=connect,
            close=Service.close,
            retry_after_s=RETRY_S,
            logger=logging.getLogger("test"),
        )
        made.start()
        return made

    def ticket(self, prompt: str, block_ids: list[int]) -> tuple[Ticket, Any]:
        """Offer blocks as those of a prompt; return the ticket as it arrives elsewhere, and the offer."""
        offer = self.handoffs.offer(keys(prompt, len(block_ids)), block_ids)
        assert offer is not None
        assert offer.ticket is not None
        ticket = Ticket.of(offer.ticket.params())
        assert ticket is not None
        return ticket, offer


class World:
    """A daemon, and engines around it."""

    def __init__(self, daemon: DaemonProcess, salt: bytes, stack: ExitStack) -> None:
        self.daemon = daemon
        self.salt = salt
        self.stack = stack
        self.hub = InprocMemoryHub()


def work(ticket: Ticket, prompt: str, block_ids: list[int], *, first: int = 0, count: int = 0) -> BlockWork:
    """Return the load of a prompt's blocks from `first` on by a ticket."""
    wanted = keys(prompt, count or first + len(block_ids))[first:]
    handoff = HandoffWork(ticket.handoff_ids, first)
    return BlockWork("r", tuple(wanted), tuple(block_ids), ticket.daemon_incarnation, handoff)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for all tests of the file, which keep apart by their salts."""
    started = DaemonProcess(tmp_path_factory.mktemp("daemon"))
    yield started
    started.kill()


@pytest.fixture
def world(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose engines end with the test."""
    with ExitStack() as stack:
        yield World(daemon, hashlib.sha256(request.node.nodeid.encode()).digest(), stack)


@pytest.fixture
def pair(world: World) -> tuple[Engine, Engine]:
    """An engine that prefills, and one that decodes."""
    return Engine(world), Engine(world)


def released(offer: Any) -> None:
    """Wait until the blocks of an offer may be used again."""
    until(offer.is_released, "the blocks are released")


def test_blocks_go_from_engine_to_engine(pair: tuple[Engine, Engine]) -> None:
    """Out of one memory into the other, behind what is there already; then the giver has its blocks back."""
    prefill, decode = pair
    prefill.rank.fill([3, 9, 4, 7], start=5)
    ticket, offer = prefill.ticket("p", [3, 9, 4, 7])
    assert decode.handoffs.is_ours(ticket)
    assert not offer.is_released()
    assert decode.rank.load(work(ticket, "p", [20, 11, 30], first=1)) == set()
    assert decode.rank.bytes_of([20, 11, 30]) == prefill.rank.bytes_of([9, 4, 7])
    released(offer)
    counts = decode.rank.side.counts
    assert (counts.handoffs_received, counts.handoffs_direct, counts.handoffs_failed) == (1, 1, 0)
    assert counts.bytes_handed_over == 3 * 2 * PIECE_BYTES
    assert counts.blocks_loaded == 3


def test_each_rank_gets_what_is_its_own(world: World) -> None:
    """A claim succeeds once and for one memory, so every rank has a handoff of its own."""
    prefill, decode = Engine(world, ranks=2), Engine(world, ranks=2)
    for number, rank in enumerate(prefill.ranks):
        rank.fill([1, 2], start=100 * number)
    ticket, offer = prefill.ticket("p", [1, 2])
    assert len(ticket.handoff_ids) == 2
    assert decode.ranks[1].load(work(ticket, "p", [8, 9])) == set()
    assert not offer.is_released()
    assert decode.ranks[0].load(work(ticket, "p", [8, 9])) == set()
    for number in range(2):
        assert decode.ranks[number].bytes_of([8, 9]) == prefill.ranks[number].bytes_of([1, 2])
    released(offer)
    assert not Engine(world).handoffs.is_ours(ticket)


def test_a_ticket_for_another_prompt_loads_nothing(pair: tuple[Engine, Engine]) -> None:
    """The number of a handoff comes through strange hands; the keys settle it, and the request recomputes."""
    prefill, decode = pair
    prefill.rank.fill([1, 2], start=5)
    ticket, offer = prefill.ticket("p", [1, 2])
    assert decode.rank.load(work(ticket, "q", [5, 6])) == {5, 6}
    assert decode.rank.side.counts.handoffs_failed == 1
    assert decode.rank.side.counts.blocks_loaded == 0
    released(offer)


def test_a_ticket_that_promises_more_than_was_offered_loads_nothing(pair: tuple[Engine, Engine]) -> None:
    """What decode was promised and does not get it computes; nothing is read beyond the offer."""
    prefill, decode = pair
    prefill.rank.fill([1, 2], start=5)
    ticket, offer = prefill.ticket("p", [1, 2])
    assert decode.rank.load(work(ticket, "p", [5, 6, 7])) == {5, 6, 7}
    released(offer)


def test_a_handoff_that_is_not_to_be_had_is_looked_for_in_the_store(pair: tuple[Engine, Engine]) -> None:
    """Claimed by another, or ended: prefill has most often stored the blocks as well."""
    prefill, decode = pair
    prefill.rank.fill([1, 2, 3], start=5)
    prefill.rank.side.save([BlockWork("s", tuple(keys("p", 2)), (1, 2))])
    ticket, offer = prefill.ticket("p", [1, 2, 3])
    prefill.handoffs.reject(ticket, "a test")
    released(offer)
    assert decode.rank.load(work(ticket, "p", [5, 6, 7])) == {7}
    assert decode.rank.bytes_of([5, 6]) == prefill.rank.bytes_of([1, 2])
    counts = decode.rank.side.counts
    assert (counts.handoffs_received, counts.handoffs_failed, counts.blocks_loaded) == (0, 1, 2)


def test_a_ticket_given_back_releases_the_blocks_at_once(pair: tuple[Engine, Engine]) -> None:
    """Nothing waits for a time-out."""
    prefill, decode = pair
    ticket, offer = prefill.ticket("p", [1, 2])
    assert not offer.is_released()
    decode.handoffs.reject(ticket, "the request was aborted")
    released(offer)


def test_the_cheapest_way_is_taken_unless_it_must_be_direct(world: World) -> None:
    """On one host a stored block is read out of the arena, and the giver has its blocks back at the claim."""
    prefill, decode = Engine(world, wants_direct=False), Engine(world)
    prefill.rank.fill([1, 2], start=5)
    prefill.rank.side.save([BlockWork("s", tuple(keys("p", 2)), (1, 2))])
    ticket, offer = prefill.ticket("p", [1, 2])
    assert decode.rank.load(work(ticket, "p", [5, 6])) == set()
    assert decode.rank.bytes_of([5, 6]) == prefill.rank.bytes_of([1, 2])
    released(offer)
    counts = decode.rank.side.counts
    assert (counts.handoffs_received, counts.handoffs_direct) == (1, 0)


def test_without_a_transport_nothing_is_lent_or_offered(world: World) -> None:
    """The engine starts all the same, and its blocks go through the store."""
    engine = Engine(world)
    settings = ClientSettings(world.daemon.lane)
    mute = dataclasses.replace(settings, one_sided=dataclasses.replace(settings.one_sided, transport=""))

    def open_mute() -> Service:
        client = KvClient.connect(mute)
        return Service(client, client.open_namespace(identity(), engine.parts, salt=world.salt))

    pool = BlockPool.of(engine.rank.layers)
    link = engine.link(lending_opener(open_mute, pool, lends=True))
    world.stack.callback(link.close)
    assert link.is_connected
    assert WorkerHandoffs(link=link, pool=pool, rank=0, is_host=True).current() is None
    scheduler = LinkedHandoffs(
        engine.scheduler_link, part_of_ranks=[0], wants_direct=True, wait_s=TIMEOUT_S, clock=engine.clock
    )
    assert not scheduler.can_offer
    assert scheduler.offer(keys("p", 2), [1, 2]) is None


def test_offers_of_a_lost_session_are_asked_about_by_the_next(pair: tuple[Engine, Engine]) -> None:
    """A late answer costs the scheduler its session, and not the engine its blocks for two minutes."""
    prefill, _ = pair
    _, offer = prefill.ticket("p", [1, 2])
    service = prefill.scheduler_link.service
    assert service is not None
    prefill.scheduler_link.renew(service, PeerUnavailableError("a test"))
    until(lambda: prefill.scheduler_link.is_connected, "there is another session")

    def is_released() -> bool:
        prefill.clock.now_s += 10.0
        return offer.is_released()

    until(is_released, "the daemon says that nobody reads")
    assert prefill.handoffs.can_offer


def test_a_claim_under_way_outlives_the_session_that_offered(pair: tuple[Engine, Engine]) -> None:
    """While somebody may be reading the blocks are not given back, whoever asks."""
    prefill, decode = pair
    ticket, offer = prefill.ticket("p", [1, 2])
    reader = decode.rank.link.service
    assert reader is not None
    reader.client.handoffs.claim(reader.namespace, ticket.handoff_ids[0])
    service = prefill.scheduler_link.service
    assert service is not None
    prefill.scheduler_link.renew(service, PeerUnavailableError("a test"))
    until(lambda: prefill.scheduler_link.is_connected, "there is another session")
    prefill.clock.now_s += 10.0
    assert not offer.is_released()
    reader.client.handoffs.reject(ticket.handoff_ids[0], "a test")

    def is_released() -> bool:
        prefill.clock.now_s += 10.0
        return offer.is_released()

    until(is_released, "the reader has let go")


def test_memory_is_lent_anew_and_the_scheduler_learns_of_it(pair: tuple[Engine, Engine]) -> None:
    """A layout ends with the worker's session: until the scheduler knows the next, nothing is offered."""
    prefill, decode = pair
    before = prefill.handoffs.known_layouts
    service = prefill.rank.link.service
    assert service is not None
    prefill.rank.link.renew(service, PeerUnavailableError("a test"))
    until(lambda: prefill.rank.handoffs.current() is not None, "the memory is lent again")
    until(lambda: prefill.handoffs.offer(keys("p", 2), [1, 2]) is None, "the daemon knows of the old end")
    prefill.learn()
    assert prefill.handoffs.known_layouts != before
    prefill.rank.fill([1, 2], start=9)
    ticket, _ = prefill.ticket("q", [1, 2])
    assert decode.rank.load(work(ticket, "q", [5, 6])) == set()
    assert decode.rank.bytes_of([5, 6]) == prefill.rank.bytes_of([1, 2])


def test_after_a_restart_of_the_daemon_all_goes_on_and_nothing_is_given_back_early(
    world: World, tmp_path: Any
) -> None:
    """Who had claimed before may still be reading, and no daemon is left to say that he is not."""
    world.daemon = DaemonProcess(tmp_path)
    prefill, decode = Engine(world), Engine(world)
    ticket, offer = prefill.ticket("p", [1, 2])
    world.daemon.kill()
    assert prefill.handoffs.offer(keys("q", 2), [3, 4]) is None
    assert decode.rank.load(work(ticket, "p", [5, 6])) == {5, 6}
    world.daemon = DaemonProcess(tmp_path)
    world.stack.callback(world.daemon.kill)

    prefill.rank.fill([7, 8], start=1)

    def is_offered() -> bool:
        prefill.learn()
        return prefill.handoffs.offer(keys("x", 1), [1]) is not None

    until(is_offered, "prefill finds the daemon, and lends anew")
    prefill.clock.now_s += 10.0
    assert not offer.is_released()
    another, _ = prefill.ticket("q", [7, 8])
    until(lambda: decode.handoffs.is_ours(another), "decode finds the daemon")
    assert not decode.handoffs.is_ours(ticket)
    until(lambda: decode.rank.link.is_connected, "the worker finds the daemon")
    assert decode.rank.load(work(another, "q", [9, 10])) == set()
    assert decode.rank.bytes_of([9, 10]) == prefill.rank.bytes_of([7, 8])


def test_an_offer_that_one_rank_cannot_make_is_given_up_and_watched(world: World) -> None:
    """The blocks of the ranks before it are on offer already: they are released, and not forgotten."""
    prefill = Engine(world, ranks=2)
    service = prefill.ranks[1].link.service
    assert service is not None
    service.client.handoffs.take_back([service.lent])  # type: ignore[list-item]
    offer = prefill.handoffs.offer(keys("p", 2), [1, 2])
    assert offer is not None
    assert offer.ticket is None
    released(offer)


def test_a_direct_handoff_says_so(pair: tuple[Engine, Engine]) -> None:
    """The record that operators see names the way."""
    prefill, decode = pair
    ticket, _ = prefill.ticket("p", [1])
    decode.rank.load(work(ticket, "p", [5]))
    service = decode.scheduler_link.service
    assert service is not None
    assert service.client.handoffs.look(ticket.handoff_ids[0]).choice == HandoffChoice.DIRECT
