"""Handoffs: OFFERED -> CLAIMED -> COMPLETED, or REJECTED | ABORTED | EXPIRED from any live state.

Who may touch what: the memory stays with the engine that offered it, which reads `is_released`
in a notice before it uses the blocks again. It is true at once when the claimer itself ends the
handoff, or nobody had claimed it. Otherwise the claimer's processes are asked, as for a lease
that has ended (`drains`), with one difference: what they do is read, and a reader learns from
the answer to its Complete that the bytes are not good. So waiting for one that is stopped ends
where it can no longer be reading, and no engine loses its memory to a peer that never answers.

A handoff through the arena needs nothing of the engine that offered it: where its session or its
memory goes first, what is staged lives on without layouts until it is claimed, ended or expires.
"""

from __future__ import annotations

import numpy as np

from kvservice.core import drains
from kvservice.core.answers import ClaimAnswer, HandoffAnswer, LeaseAnswer, OfferAnswer
from kvservice.core.batches import committed_mask, committed_slots, pin
from kvservice.core.books import Books, EndedHandoff
from kvservice.core.effects import Revoke, Tell
from kvservice.core.engine_memory import shared_transports
from kvservice.core.errors import (
    HandoffClaimedError,
    HandoffEndedError,
    HandoffUnknownError,
    InvalidFieldError,
    NotOwnerError,
    RepresentationMismatchError,
)
from kvservice.core.events import Claim, EndHandoff, LookAtHandoff, Offer
from kvservice.core.handoff_choice import Decision, HandoffChoice, HandoffPolicy, Ways, decide
from kvservice.core.handoff_offer import check_offer, find_repeated
from kvservice.core.lease_desk import LeaseDesk
from kvservice.core.limits import REASON_CHARACTERS_LIMIT
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import Handoff, HandoffState, Hold, Notice, Session
from kvservice.core.row_table import KEY_BYTES
from kvservice.core.slots import U8, U64

_OUTCOME = {
    HandoffState.COMPLETED: ItemOutcome.ALREADY_COMPLETED,
    HandoffState.REJECTED: ItemOutcome.ALREADY_REJECTED,
    HandoffState.ABORTED: ItemOutcome.ALREADY_ABORTED,
    HandoffState.EXPIRED: ItemOutcome.ALREADY_EXPIRED,
}
_LIVE = frozenset({HandoffState.OFFERED, HandoffState.CLAIMED})


class HandoffDesk:
    """Handles Offer, Claim, EndHandoff and LookAtHandoff, and the handoffs in a beat."""

    def __init__(self, books: Books, leases: LeaseDesk) -> None:
        self._books = books
        self._leases = leases

    # ---- what clients ask for

    def offer(self, event: Offer, now: int) -> OfferAnswer:
        """Record what may be claimed; a repeated request finds it again."""
        books = self._books
        session = books.session(event.token, now)
        repeated = find_repeated(books, session, event)
        if repeated is not None:
            return self._describe(repeated, now)
        spaces, layouts = check_offer(books, session, event)
        tenant = books.tenant(session.tenant)
        staged = None
        may_stage = event.policy is not HandoffPolicy.DIRECT
        if may_stage and committed_mask(tenant, spaces, event.keys).all():
            staged = committed_slots(books, tenant, spaces, event.keys)
        transports = shared_transports(layouts)
        size = len(event.keys) // KEY_BYTES * sum(space.block_bytes for space in spaces)
        # Whether it could go at all if the claimer had every transport.
        decide(event.policy, Ways(size, transports, bool(layouts), "shm" if staged else None))
        ttl, hold = books.ttl_ns(event.ttl_ns), books.limits.handoff_hold_ns
        if staged is not None:
            pin(staged)
        handoff = Handoff(
            books.mint(),
            session,
            event.request_id,
            event.spaces,
            event.keys,
            layouts,
            event.blocks,
            event.checksums,
            event.policy,
            staged,
            now + min(ttl, hold),
            now + hold,
        )
        books.handoffs[handoff.handoff_id] = handoff
        books.handoff_requests[(session.engine, event.request_id)] = handoff.handoff_id
        session.offered.add(handoff.handoff_id)
        books.schedule(handoff.deadline_ns, handoff.handoff_id)
        return self._describe(handoff, now)

    def claim(self, event: Claim, now: int) -> ClaimAnswer:
        """Give a handoff to the first who asks; the same session gets the same answer again."""
        books = self._books
        session = books.session(event.token, now)
        spaces = books.opened(session, event.spaces)
        handoff = self._live(event.handoff_id, session)
        if handoff.claimer is not None and handoff.claimer is not session:
            raise HandoffClaimedError(f"handoff {event.handoff_id} was claimed by another session before")
        if event.spaces != handoff.spaces:
            raise RepresentationMismatchError(
                f"space_ids {list(event.spaces)} are not those of handoff {event.handoff_id}, "
                f"{list(handoff.spaces)}: identity, parts and shapes must be equal, in the same order"
            )
        decision = handoff.decision
        if decision is None:
            size = len(handoff.keys) // KEY_BYTES * sum(space.block_bytes for space in spaces)
            decision = self._give(handoff, session, event.transports, size, now)
        is_direct = decision.choice is HandoffChoice.DIRECT
        lease: LeaseAnswer | None = None
        if not is_direct:
            lease = self._leases.describe(handoff.lease_id, now)
            if lease is None:
                raise HandoffEndedError(
                    f"the lease of handoff {event.handoff_id} was released by its claimer, which by that had "
                    "read what it needs: complete the handoff, or abort it"
                )
        return ClaimAnswer(
            decision,
            handoff.keys,
            handoff.owner.incarnation,
            handoff.layouts if is_direct else (),
            handoff.blocks,
            handoff.checksums,
            lease,
            handoff.deadline_ns - now,
        )

    def end(self, event: EndHandoff, now: int) -> ItemOutcome:
        """End it by the word of one side; idempotent."""
        books = self._books
        session = books.session(event.token, now)
        if len(event.reason) > REASON_CHARACTERS_LIMIT:
            raise InvalidFieldError(
                f"reason has {len(event.reason)} characters; at most {REASON_CHARACTERS_LIMIT} are allowed"
            )
        books.check_life(event.handoff_id, "handoff")
        handoff = books.handoffs.get(event.handoff_id)
        if handoff is None or handoff.owner.tenant != session.tenant:
            books.late_ends_count += 1
            ended = books.ended_handoffs.get(event.handoff_id)
            if ended is None or ended.tenant != session.tenant:
                return ItemOutcome.UNKNOWN
            self._acknowledge(session, [event.handoff_id])
            return _OUTCOME[ended.state]
        claimer = handoff.claimer
        is_claimers = claimer is not None and claimer.engine == session.engine
        is_owners = handoff.owner.engine == session.engine
        may = {
            HandoffState.COMPLETED: is_claimers,
            # Whoever was to claim it may say that it cannot.
            HandoffState.REJECTED: is_claimers or claimer is None,
            HandoffState.ABORTED: is_claimers or is_owners,
        }
        if not may.get(event.how, False):
            raise NotOwnerError(
                f"handoff {event.handoff_id} is not this session's to end as {event.how.name}; "
                "its claimer completes and rejects it, and either side aborts it"
            )
        waiting = set() if is_claimers else self._readers(handoff)
        self._finish(handoff, event.how, event.reason, waiting, now)
        return ItemOutcome.DONE

    def look(self, event: LookAtHandoff, now: int) -> HandoffAnswer:
        """Say what became of a handoff of the caller's tenant."""
        books = self._books
        session = books.session(event.token, now)
        handoff = books.handoffs.get(event.handoff_id)
        if handoff is not None and handoff.owner.tenant == session.tenant:
            count = len(handoff.keys) // KEY_BYTES
            if handoff.decision is None:
                # Without layouts nobody ever reads the memory, whoever claims it.
                is_released = not handoff.layouts
                return HandoffAnswer(HandoffState.OFFERED, is_released=is_released, keys_count=count)
            return HandoffAnswer(
                HandoffState.CLAIMED,
                is_released=handoff.decision.choice is HandoffChoice.STAGED,
                keys_count=count,
                choice=handoff.decision.choice,
                reason=handoff.decision.reason,
            )
        ended = books.ended_handoffs.get(event.handoff_id)
        if ended is None or ended.tenant != session.tenant:
            raise self._unknown(event.handoff_id)
        return HandoffAnswer(
            ended.state,
            is_released=event.handoff_id not in books.holds,
            keys_count=ended.keys_count,
            choice=ended.choice,
            reason=ended.reason,
        )

    # ---- the beat

    def prolong(self, session: Session, handoff_ids: U64, now: int) -> tuple[U8, list[int]]:
        """Renew claims; return an outcome for each, and the deadlines of those that live."""
        books = self._books
        outcomes = np.full(len(handoff_ids), int(ItemOutcome.DONE), dtype=np.uint8)
        deadlines: list[int] = []
        for index, handoff_id in enumerate(handoff_ids.tolist()):
            handoff = books.handoffs.get(handoff_id)
            if (
                handoff is not None
                and handoff.claimer is not None
                and handoff.claimer.engine == session.engine
            ):
                asked = min(now + books.limits.default_ttl_ns, handoff.hold_until_ns)
                handoff.deadline_ns = max(handoff.deadline_ns, asked)
                lease = books.leases.get(handoff.lease_id)
                if lease is not None:
                    lease.deadline_ns = max(lease.deadline_ns, handoff.deadline_ns)
                deadlines.append(handoff.deadline_ns)
                continue
            ended = books.ended_handoffs.get(handoff_id)
            is_known = ended is not None and ended.tenant == session.tenant
            outcomes[index] = _OUTCOME[ended.state] if ended and is_known else ItemOutcome.UNKNOWN
        return outcomes, deadlines

    def acknowledge(self, session: Session, revoked_ids: list[int], noticed_ids: list[int]) -> None:
        """Take a session's word that it reads no more, and that it has been told enough."""
        self._acknowledge(session, revoked_ids)
        for handoff_id in noticed_ids:
            notice = session.notices.get(handoff_id)
            # What is yet to come, the release or the end, is not forgotten for an early word.
            if notice is not None and notice.is_released and notice.state not in _LIVE:
                del session.notices[handoff_id]

    # ---- what happens by itself

    def expire(self, handoff: Handoff, now: int) -> None:
        """End a handoff that was not claimed, or not renewed, in time."""
        reason = "nobody claimed it in time" if handoff.claimer is None else "its claimer did not renew it"
        self._finish(handoff, HandoffState.EXPIRED, reason, self._readers(handoff), now)

    def let_go(self, hold: Hold) -> None:
        """Release the memory of an ended handoff: nobody can be reading it any more."""
        books = self._books
        del books.holds[hold.handoff_id]
        for token in hold.waiting:
            reader = books.sessions.get(token)
            if reader is not None:
                reader.revoked.discard(hold.handoff_id)
        self._tell(hold.owner_token, Notice(hold.handoff_id, hold.state, True, hold.reason))

    def close(self, session: Session, now: int, *, is_certain: bool) -> None:
        """End what a dead session had offered or claimed, and wait for it no more if it is certainly dead.

        What goes through the arena outlives the one who offered it. The session is no longer among the
        living, so it is among the readers only if it fell silent.
        """
        books = self._books
        if not is_certain:
            # Nobody has seen it die: it may be reading until the deadline that it knows of.
            for handoff in books.handoffs.values():
                if handoff.claimer is not None and handoff.claimer.engine == session.engine:
                    handoff.silent.add(session.token)
        for handoff_id in sorted(session.offered):
            handoff = books.handoffs[handoff_id]
            if self._leave_to_arena(handoff):
                # As after an end: who comes back under this request offers anew, and is told of that.
                del books.handoff_requests[(session.engine, handoff.request_id)]
                session.offered.discard(handoff_id)
                continue
            reason = "the engine that offered it is gone"
            self._finish(handoff, HandoffState.ABORTED, reason, self._readers(handoff), now)
        for handoff_id in sorted(session.claimed):
            handoff = books.handoffs[handoff_id]
            reason = "the engine that claimed it is gone"
            self._finish(handoff, HandoffState.ABORTED, reason, self._readers(handoff), now)
        if is_certain:
            owed = [hold.handoff_id for hold in books.holds.values() if session.token in hold.waiting]
            self._acknowledge(session, owed)

    def readers_of(self, layouts: set[int]) -> list[int]:
        """Return the handoffs by which somebody may be reading blocks of these layouts now."""
        books = self._books
        live: list[tuple[int, tuple[int, ...]]] = [
            (handoff.handoff_id, tuple(layout.layout_id for layout in handoff.layouts))
            for handoff in books.handoffs.values()
            if handoff.decision is not None and handoff.decision.choice is HandoffChoice.DIRECT
        ]
        held = [
            (hold.handoff_id, tuple(layout.layout_id for layout in hold.layouts))
            for hold in books.holds.values()
        ]
        return sorted(handoff_id for handoff_id, used in live + held if layouts.intersection(used))

    def abort_from(self, layouts: set[int], now: int) -> None:
        """End the handoffs that are offered out of layouts which are going, or leave them to the arena."""
        reason = "its segments are gone"
        for handoff in list(self._books.handoffs.values()):
            if not layouts.intersection(layout.layout_id for layout in handoff.layouts):
                continue
            if not self._leave_to_arena(handoff):
                self._finish(handoff, HandoffState.ABORTED, reason, self._readers(handoff), now)
            elif handoff.claimer is None:
                # At a claim its owner was told as much.
                notice = Notice(handoff.handoff_id, HandoffState.OFFERED, True, reason)
                self._tell(handoff.owner.token, notice)

    # ---- private

    def _give(
        self, handoff: Handoff, session: Session, transports: frozenset[str], size_bytes: int, now: int
    ) -> Decision:
        """Make a session the claimer, by the best way that there is; raises with nothing changed."""
        common = shared_transports(handoff.layouts) & transports
        staged = None
        if handoff.staged is not None:
            staged = "shm" if session.is_local else "tcp"
        decision = decide(handoff.policy, Ways(size_bytes, common, bool(handoff.layouts), staged))
        books = self._books
        asked = min(now + books.limits.default_ttl_ns, handoff.hold_until_ns)
        deadline = max(handoff.deadline_ns, asked)
        if decision.choice is HandoffChoice.STAGED and handoff.staged is not None:
            keys_count = len(handoff.keys) // KEY_BYTES
            lease = self._leases.grant(session, handoff.staged, keys_count, deadline - now, now)
            handoff.lease_id = lease.lease_id
        self._drop_staged(handoff)
        handoff.claimer, handoff.decision = session, decision
        handoff.deadline_ns = deadline
        session.claimed.add(handoff.handoff_id)
        # Out of the arena nobody reads the memory that it was offered from.
        is_released = decision.choice is HandoffChoice.STAGED
        notice = Notice(handoff.handoff_id, HandoffState.CLAIMED, is_released, decision.reason)
        self._tell(handoff.owner.token, notice)
        return decision

    def _describe(self, handoff: Handoff, now: int) -> OfferAnswer:
        """Answer an offer; the last operation of its readers may end a bound after the last renewal."""
        hold_ns = handoff.hold_until_ns - now + self._books.limits.operation_bound_ns
        return OfferAnswer(handoff.handoff_id, handoff.deadline_ns - now, hold_ns)

    def _finish(
        self, handoff: Handoff, state: HandoffState, reason: str, waiting: set[bytes], now: int
    ) -> None:
        """End a live handoff; its memory is held while any of `waiting` may be reading it."""
        books = self._books
        del books.handoffs[handoff.handoff_id]
        if handoff.handoff_id in handoff.owner.offered:
            handoff.owner.offered.discard(handoff.handoff_id)
            del books.handoff_requests[(handoff.owner.engine, handoff.request_id)]
        self._drop_staged(handoff)
        claimer, decision = handoff.claimer, handoff.decision
        if claimer is not None:
            claimer.claimed.discard(handoff.handoff_id)
        lease = books.leases.get(handoff.lease_id)
        if lease is not None:
            self._leases.end_with_handoff(lease, waiting, now)
        choice = HandoffChoice.UNDECIDED if decision is None else decision.choice
        books.note_handoff_end(
            handoff.handoff_id,
            EndedHandoff(state, reason, handoff.owner.tenant, len(handoff.keys) // KEY_BYTES, choice),
        )
        is_held = bool(waiting) and choice is HandoffChoice.DIRECT
        self._tell(handoff.owner.token, Notice(handoff.handoff_id, state, not is_held, reason))
        if not is_held:
            return
        # Readers post nothing after the deadline that they last knew of.
        until = max(now, handoff.deadline_ns) + books.limits.operation_bound_ns
        hold = Hold(
            handoff.handoff_id, handoff.owner.token, handoff.layouts, set(waiting), until, state, reason
        )
        books.holds[hold.handoff_id] = hold
        books.schedule(until, hold.handoff_id)
        for token in sorted(waiting & books.sessions.keys()):
            books.sessions[token].revoked.add(hold.handoff_id)
            books.effects.append(Revoke(token, hold.handoff_id))

    def _readers(self, handoff: Handoff) -> set[bytes]:
        """Return the processes of the claimer's engine, which may be reading what a handoff names.

        Those on other hosts too: they map nothing of the arena, but read engines' memory all the same.
        """
        claimer = handoff.claimer
        if claimer is None:
            return set()
        living = {s.token for s in self._books.sessions.values() if s.engine == claimer.engine}
        return living | handoff.silent

    def _leave_to_arena(self, handoff: Handoff) -> bool:
        """Have a handoff go on without the memory that it was offered from; False if it needs that."""
        if handoff.decision is None:
            is_staged = handoff.staged is not None
        else:
            is_staged = handoff.decision.choice is HandoffChoice.STAGED
        if is_staged:
            handoff.layouts = ()
        return is_staged

    def _drop_staged(self, handoff: Handoff) -> None:
        if handoff.staged is not None:
            drains.unpin(handoff.staged)
            handoff.staged = None

    def _acknowledge(self, session: Session, handoff_ids: list[int]) -> None:
        for handoff_id in handoff_ids:
            hold = self._books.holds.get(handoff_id)
            if hold is None:
                continue
            session.revoked.discard(handoff_id)
            hold.waiting.discard(session.token)
            if not hold.waiting:
                self.let_go(hold)

    def _tell(self, token: bytes, notice: Notice) -> None:
        owner = self._books.sessions.get(token)
        if owner is None:
            return
        owner.notices[notice.handoff_id] = notice
        if len(owner.notices) > 2 * self._books.limits.max_handoffs:
            # It never acknowledges; what it has not been told it can still ask for.
            del owner.notices[next(iter(owner.notices))]
        self._books.effects.append(Tell(token, notice))

    def _live(self, handoff_id: int, session: Session) -> Handoff:
        handoff = self._books.handoffs.get(handoff_id)
        if handoff is not None and handoff.owner.tenant == session.tenant:
            return handoff
        ended = self._books.ended_handoffs.get(handoff_id)
        if ended is None or ended.tenant != session.tenant:
            raise self._unknown(handoff_id)
        raise HandoffEndedError(
            f"handoff {handoff_id} has ended as {ended.state.name} ({ended.reason}); look the blocks up, "
            "or compute them"
        )

    def _unknown(self, handoff_id: int) -> HandoffUnknownError:
        self._books.check_life(handoff_id, "handoff")
        return HandoffUnknownError(
            f"handoff {handoff_id} was never offered in this tenant, or is forgotten; look the blocks up"
        )
