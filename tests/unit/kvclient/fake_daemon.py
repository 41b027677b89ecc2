"""A small daemon on a Unix socket: real frames and real memfds, and it fails when told to.

It knows one tenant, one segment and one slot size, and keeps no deadlines. What a test
wants broken it asks for: methods that are never answered, that hang up, that fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Self

import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvproto.kv.v1 import (
    block_pb2,
    capabilities_service_pb2,
    event_service_pb2,
    handoff_service_pb2,
    lifecycle_service_pb2,
    local_lane_pb2,
    segment_service_pb2,
    session_service_pb2,
    tier_service_pb2,
    transfer_service_pb2,
)
from kvservice import native
from kvservice.core.errors import KvError, ReservationUnknownError, SessionUnknownError, SpaceNotOpenError
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import GRANULE_BYTES
from kvservice.ports.methods import Method
from kvservice.transports.frames import Frame, FrameKind, FrameReader, encode, encode_error
from kvservice.transports.segments import OwnedSegment, OwnedTable

KEY_BYTES = 32
SEGMENT = 7
SEGMENT_BYTES = 1 << 20
ROWS_COUNT = 1024
WAIT_S = 5.0
TTL_S = 10

REQUESTS: dict[int, type[Any]] = {
    Method.ATTACH: session_service_pb2.AttachRequest,
    Method.DETACH: session_service_pb2.DetachRequest,
    Method.OPEN_NAMESPACE: session_service_pb2.OpenNamespaceRequest,
    Method.HEARTBEAT: session_service_pb2.HeartbeatRequest,
    Method.LOOKUP: lifecycle_service_pb2.LookupRequest,
    Method.RESERVE: lifecycle_service_pb2.ReserveRequest,
    Method.COMMIT: lifecycle_service_pb2.CommitRequest,
    Method.ABORT: lifecycle_service_pb2.AbortRequest,
    Method.ACQUIRE: lifecycle_service_pb2.AcquireRequest,
    Method.RENEW: lifecycle_service_pb2.RenewRequest,
    Method.RELEASE: lifecycle_service_pb2.ReleaseRequest,
    Method.VERIFY: lifecycle_service_pb2.VerifyRequest,
    Method.REGISTER_SEGMENTS: segment_service_pb2.RegisterSegmentsRequest,
    Method.UNREGISTER_SEGMENTS: segment_service_pb2.UnregisterSegmentsRequest,
    Method.OFFER_HANDOFF: handoff_service_pb2.OfferHandoffRequest,
    Method.CLAIM_HANDOFF: handoff_service_pb2.ClaimHandoffRequest,
    Method.COMPLETE_HANDOFF: handoff_service_pb2.CompleteHandoffRequest,
    Method.REJECT_HANDOFF: handoff_service_pb2.RejectHandoffRequest,
    Method.ABORT_HANDOFF: handoff_service_pb2.AbortHandoffRequest,
    Method.GET_HANDOFF: handoff_service_pb2.GetHandoffRequest,
    Method.BEGIN_TRANSFER: transfer_service_pb2.BeginTransferRequest,
    Method.END_TRANSFER: transfer_service_pb2.EndTransferRequest,
    Method.LIST_TIERS: tier_service_pb2.ListTiersRequest,
    Method.PURGE_NAMESPACE: tier_service_pb2.PurgeNamespaceRequest,
    Method.WATCH_EVENTS: event_service_pb2.WatchEventsRequest,
    Method.GET_CAPABILITIES: capabilities_service_pb2.GetCapabilitiesRequest,
    Method.MAP_SEGMENTS: local_lane_pb2.MapSegmentsRequest,
}


class Life:
    """One life of the daemon: its memory and what it granted."""

    def __init__(self) -> None:
        self.incarnation = os.urandom(16)
        self.tokens: set[bytes] = set()
        self.spaces: dict[int, int] = {}
        self.space_ids: dict[tuple[bytes, bytes, bytes], int] = {}
        # Handles of one life mean nothing in another.
        self.first_space = 1 + int.from_bytes(self.incarnation[:2], "little") * 1000
        self.segment = OwnedSegment.create(SEGMENT_BYTES)
        self.table = OwnedTable.create(ROWS_COUNT)
        self.next_granule = 0
        self.next_id = int.from_bytes(self.incarnation[:3], "little") << 20
        self.committed: dict[tuple[bytes, int], tuple[int, int, int]] = {}
        self.reservations: dict[int, dict[str, Any]] = {}
        self.requests: dict[bytes, int] = {}
        self.leases: dict[int, list[tuple[int, int, int]]] = {}

    def close(self) -> None:
        """Let go of the memory."""
        self.segment.close()
        self.table.close()


class FakeDaemon:
    """`with FakeDaemon(path) as daemon:`; every attribute may be changed while it runs."""

    def __init__(self, path: str, *, renew_interval_s: float = 60.0) -> None:
        self.path = path
        self.renew_interval_s = renew_interval_s
        self.ttl_s: float = TTL_S
        self.silent: set[Method] = set()
        self.hang_ups: Counter[Method] = Counter()
        self.deaths: set[Method] = set()
        self.failures: dict[Method, KvError] = {}
        self.revoked_ids: list[int] = []
        self.calls: list[tuple[Method, Any]] = []
        self.connections: list[socket.socket] = []
        self.is_directory_offered = True
        # Located slots are given with generations that have moved already.
        self.moves_located_slots = False
        self.tcp_address = ""
        self.version = "fake"
        self.garbage: set[Method] = set()
        self.last_words: KvError | None = None
        self.held_back: set[Method] = set()
        self._held_back: list[bytes] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.life = Life()
        self._lives: list[Life] = []
        self._listener = self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for life in (self.life, *self._lives):
            life.close()

    # ---- what tests do to it

    def stop(self) -> None:
        """Stop listening and hang up on everybody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()
        self.drop_connections()
        for thread in self._threads:
            thread.join(WAIT_S)

    def restart(self) -> None:
        """Come back as another life, with empty memory."""
        self.stop()
        self.life.close()
        self.life = Life()
        self._listener = self._listen()

    def drop_connections(self) -> None:
        """Hang up; sessions live on."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def join_connections(self) -> None:
        """Wait until every connection has ended, and let go of its descriptor."""
        for thread in self._threads[1:]:
            thread.join(WAIT_S)
        del self._threads[1:]
        self.connections.clear()

    def push(self, notice: session_service_pb2.StreamResponse) -> None:
        """Say something unasked to everybody."""
        for connection in self.connections:
            connection.sendall(encode(FrameKind.STREAM, Method.STREAM, 0, 0, notice.SerializeToString()))

    def count(self, method: Method) -> int:
        """Return how often a method was called."""
        return sum(called == method for called, _ in self.calls)

    def last(self, method: Method) -> Any:
        """Return the last request of a method."""
        return next(request for called, request in reversed(self.calls) if called == method)

    def wait_for(self, method: Method, count: int = 1) -> None:
        """Wait until a method was called so often."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(method) >= count, WAIT_S), f"no {method.name}"

    def forget_sessions(self) -> None:
        """End every session, as if its beats had been missed."""
        self.life.tokens.clear()

    def replace_directory(self) -> None:
        """Move the rows to another table, as growing does."""
        old, self.life.table = self.life.table, OwnedTable.create(ROWS_COUNT * 2)
        native.copy_rows(old.rows, ROWS_COUNT, self.life.table.rows, ROWS_COUNT * 2)
        old.supersede()
        old.close()

    def evict(self, key: bytes) -> None:
        """Give the slots of a key to another owner, leaving its rows where they are."""
        for (committed_key, _), (granule, _, _) in self.life.committed.items():
            if committed_key == key:
                self.life.segment.generations[granule] += 1

    def damage(self, key: bytes) -> None:
        """Change the first stored byte of a key."""
        for (committed_key, _), (granule, _, _) in self.life.committed.items():
            if committed_key == key:
                view = self.life.segment.memory.view
                view[granule * GRANULE_BYTES] ^= 0xFF

    # ---- serving

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen()
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._threads = [thread]
        thread.start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if self.last_words is not None:
                connection.sendall(encode(FrameKind.ERROR, 0, 0, 0, encode_error(self.last_words)))
                connection.close()
                continue
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader, session = FrameReader(), {"token": b""}
        with contextlib.suppress(OSError), connection:
            while received := connection.recv(1 << 16):
                for frame in reader.feed(received):
                    if not self._answer(connection, frame, session):
                        return

    def note(self, method: Method, request: Any) -> bool:
        """Write a call down; False means: hang up instead of answering."""
        with self._changed:
            self.calls.append((method, request))
            self._changed.notify_all()
        if not self.hang_ups[method]:
            return True
        self.hang_ups[method] -= 1
        if method in self.deaths:
            self._lives.append(self.life)
            self.life = Life()
        return False

    def handle(self, method: Method, request: Any, token: bytes) -> Any:
        """Answer a request of the session of `token`; raises KvError."""
        if method in self.failures:
            raise self.failures[method]
        if method not in {Method.ATTACH, Method.LIST_TIERS} and token not in self.life.tokens:
            raise SessionUnknownError("no such session; attach")
        return getattr(self, f"_{method.name.lower()}")(request)

    def _answer(self, connection: socket.socket, frame: Frame, session: dict[str, bytes]) -> bool:
        method = Method(frame.method)
        request = REQUESTS[method].FromString(frame.body)
        if not self.note(method, request):
            return False
        if method in self.silent:
            return True
        descriptors: list[int] = []
        kind = FrameKind.STREAM if method == Method.WATCH_EVENTS else FrameKind.RESPONSE
        try:
            answer = self.handle(method, request, session["token"])
            if method == Method.MAP_SEGMENTS:
                answer, descriptors = answer
            if method == Method.ATTACH:
                session["token"] = answer.session_token
            body = b"\xff" if method in self.garbage else answer.SerializeToString()
        except KvError as error:
            kind, body = FrameKind.ERROR, encode_error(error)
        packed = encode(kind, frame.method, frame.call_id, 0, body)
        if method in self.held_back:
            self._held_back.append(packed)
            return True
        packed = b"".join(self._held_back) + packed
        self._held_back.clear()
        if descriptors:
            socket.send_fds(connection, [packed], descriptors)
        else:
            connection.sendall(packed)
        return True

    def _attach(self, request: Any) -> Any:
        is_resumed = request.resume_token in self.life.tokens
        token = request.resume_token if is_resumed else os.urandom(16)
        self.life.tokens.add(token)
        return session_service_pb2.AttachResponse(
            session_token=token,
            session_id=1,
            daemon_incarnation=self.life.incarnation,
            resumed=is_resumed,
            lease_ttl=Duration(seconds=TTL_S),
            renew_interval=_duration(self.renew_interval_s),
            limits=capabilities_service_pb2.Limits(max_batch_keys=1000),
            tenant="default",
            tcp_address=self.tcp_address,
        )

    def _detach(self, request: Any) -> Any:
        return session_service_pb2.DetachResponse()

    def _open_namespace(self, request: Any) -> Any:
        ids = []
        for part in request.parts:
            known = (request.identity.SerializeToString(), request.salt, part.SerializeToString())
            fresh = self.life.first_space + len(self.life.space_ids)
            ids.append(self.life.space_ids.setdefault(known, fresh))
            self.life.spaces[ids[-1]] = part.block_bytes
        return session_service_pb2.OpenNamespaceResponse(namespace_id=bytes(32), space_ids=ids)

    def _heartbeat(self, request: Any) -> Any:
        self.revoked_ids = [held for held in self.revoked_ids if held not in request.acknowledged_ids]
        return session_service_pb2.HeartbeatResponse(
            lease_outcomes=bytes([ItemOutcome.DONE]) * len(request.lease_ids),
            reservation_outcomes=bytes([ItemOutcome.DONE]) * len(request.reservation_ids),
            remaining=_duration(self.ttl_s),
            revoked_ids=self.revoked_ids,
        )

    def _lookup(self, request: Any) -> Any:
        keys = _keys(request.keys)
        found = [self._has(key, request.space_ids) for key in keys]
        prefix_count = [*found, False].index(False)
        answer = lifecycle_service_pb2.LookupResponse(
            outcomes=bytes(ItemOutcome.HIT if hit else ItemOutcome.MISS for hit in found),
            prefix_count=prefix_count,
        )
        if request.locate and prefix_count:
            answer.slots.CopyFrom(self._committed_slots(keys[:prefix_count], request.space_ids))
            if self.moves_located_slots:
                answer.slots.generations = b"\xff" * len(answer.slots.generations)
        return answer

    def _committed_slots(self, keys: list[bytes], spaces: Any) -> block_pb2.SlotArrays:
        places = [self.life.committed[key, space] for key in keys for space in spaces]
        slots = self._slots([granule for granule, _, _ in places])
        slots.checksums = np.array([checksum for _, _, checksum in places], np.uint32).tobytes()
        return slots

    def _reserve(self, request: Any) -> Any:
        self._check_open(request.space_ids)
        life = self.life
        if request.request_id in life.requests:
            return life.reservations[life.requests[request.request_id]]["answer"]
        keys = _keys(request.keys)
        outcomes = bytes(
            ItemOutcome.ALREADY_COMMITTED if self._has(key, request.space_ids) else ItemOutcome.GRANTED
            for key in keys
        )
        granted = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == ItemOutcome.GRANTED]
        places = []
        for key in granted:
            for space in request.space_ids:
                places.append((key, space, life.next_granule))
                life.next_granule += -(-life.spaces[space] // GRANULE_BYTES)
        life.next_id += 1
        answer = lifecycle_service_pb2.ReserveResponse(
            reservation_id=life.next_id if granted else 0,
            outcomes=outcomes,
            slots=self._slots([granule for _, _, granule in places]),
            remaining=_duration(self.ttl_s),
        )
        life.requests[request.request_id] = life.next_id
        life.reservations[life.next_id] = {"answer": answer, "places": places, "keys": len(granted)}
        return answer

    def _commit(self, request: Any) -> Any:
        life = self.life
        reservation = life.reservations.get(request.reservation_id)
        if reservation is None:
            raise ReservationUnknownError(f"no reservation {request.reservation_id}; reserve")
        for (key, space, granule), checksum in zip(
            reservation["places"], np.frombuffer(request.checksums, np.uint32).tolist(), strict=True
        ):
            if (key, space) in life.committed:
                continue
            self._insert(key, space, granule, life.spaces[space], checksum)
        return lifecycle_service_pb2.CommitResponse(
            outcome=int(ItemOutcome.DONE), keys_count=reservation["keys"]
        )

    def _insert(self, key: bytes, space: int, granule: int, length: int, checksum: int) -> None:
        life = self.life
        life.committed[key, space] = (granule, length, checksum)
        native.insert_rows(
            life.table.rows,
            life.table.rows_count,
            key,
            space,
            np.array([SEGMENT], np.uint32),
            np.array([granule], np.uint32),
            length,
            np.array([checksum], np.uint32),
            life.segment.generations[granule : granule + 1].copy(),
        )

    def _abort(self, request: Any) -> Any:
        return lifecycle_service_pb2.AbortResponse(outcome=int(ItemOutcome.DONE))

    def _acquire(self, request: Any) -> Any:
        self._check_open(request.space_ids)
        prefix = []
        for key in _keys(request.keys):
            if not self._has(key, request.space_ids):
                break
            prefix.append(key)
        if not prefix:
            return lifecycle_service_pb2.AcquireResponse()
        self.life.next_id += 1
        places = [self.life.committed[key, space] for key in prefix for space in request.space_ids]
        slots = self._committed_slots(prefix, request.space_ids)
        self.life.leases[self.life.next_id] = places
        lease = lifecycle_service_pb2.Lease(
            lease_id=self.life.next_id,
            keys_count=len(prefix),
            slots=slots,
            remaining=_duration(self.ttl_s),
        )
        return lifecycle_service_pb2.AcquireResponse(lease=lease)

    def _renew(self, request: Any) -> Any:
        return lifecycle_service_pb2.RenewResponse(
            lease_outcomes=bytes([ItemOutcome.DONE]) * len(request.lease_ids),
            reservation_outcomes=bytes([ItemOutcome.DONE]) * len(request.reservation_ids),
            remaining=_duration(self.ttl_s),
        )

    def _release(self, request: Any) -> Any:
        return lifecycle_service_pb2.ReleaseResponse(
            outcomes=bytes([ItemOutcome.DONE]) * len(request.lease_ids)
        )

    def _verify(self, request: Any) -> Any:
        keys = _keys(request.keys)
        return lifecycle_service_pb2.VerifyResponse(outcomes=bytes([ItemOutcome.MISS]) * len(keys))

    def _list_tiers(self, request: Any) -> Any:
        return tier_service_pb2.ListTiersResponse(tiers=[tier_service_pb2.Tier(name="dram")])

    def _purge_namespace(self, request: Any) -> Any:
        return tier_service_pb2.PurgeNamespaceResponse(blocks_count=len(self.life.committed))

    def _watch_events(self, request: Any) -> Any:
        event = event_service_pb2.BlockEvent(sequence=request.after_sequence + 1)
        return event_service_pb2.WatchEventsResponse(events=[event])

    def _get_capabilities(self, request: Any) -> Any:
        return capabilities_service_pb2.GetCapabilitiesResponse(version=self.version)

    def _map_segments(self, request: Any) -> Any:
        life = self.life
        segments = list(request.segments)
        answer = local_lane_pb2.MapSegmentsResponse(
            segments=segments,
            sizes_bytes=[life.segment.size_bytes] * len(segments),
            generations_bytes=[life.segment.generations_bytes] * len(segments),
        )
        descriptors = [life.segment.fd, life.segment.generations_fd] * len(segments)
        if request.directory and self.is_directory_offered:
            answer.directory_rows_count = life.table.rows_count
            descriptors.append(life.table.fd)
        return answer, descriptors

    def _has(self, key: bytes, spaces: Any) -> bool:
        self._check_open(spaces)
        return all((key, space) in self.life.committed for space in spaces)

    def _check_open(self, spaces: Any) -> None:
        for space in spaces:
            if space not in self.life.spaces:
                raise SpaceNotOpenError(f"space {space} is not open; open the namespace")

    def _slots(self, granules: list[int]) -> block_pb2.SlotArrays:
        return block_pb2.SlotArrays(
            segments=np.full(len(granules), SEGMENT, np.uint32).tobytes(),
            granules=np.array(granules, np.uint32).tobytes(),
            generations=self.life.segment.generations[granules].tobytes(),
        )


def _keys(packed: bytes) -> list[bytes]:
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


def _duration(value_s: float) -> Duration:
    return Duration(seconds=int(value_s), nanos=int(value_s % 1 * 1e9))
