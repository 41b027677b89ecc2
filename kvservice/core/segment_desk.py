"""Segments of engines' own memory, and the layouts of blocks in them."""

from __future__ import annotations

import numpy as np

from kvservice.core.answers import SegmentsAnswer
from kvservice.core.books import Books
from kvservice.core.engine_memory import KnownLayout, KnownSegment, check_call, check_count
from kvservice.core.errors import DrainingError, InvalidFieldError, SegmentInUseError
from kvservice.core.events import RegisterSegments, UnregisterSegments
from kvservice.core.handoff_desk import HandoffDesk
from kvservice.core.records import Session
from kvservice.core.slots import U64


class SegmentDesk:
    """Handles RegisterSegments and UnregisterSegments."""

    def __init__(self, books: Books, handoffs: HandoffDesk) -> None:
        self._books = books
        self._handoffs = handoffs

    def register(self, event: RegisterSegments, now: int) -> SegmentsAnswer:
        """Remember memory of the session's process."""
        books = self._books
        session = books.session(event.token, now)
        if books.is_draining:
            raise DrainingError("the daemon is stopping and takes no segments", retry_after_ms=1000)
        check_call(segments_count=len(event.segments), layouts_count=len(event.layouts))
        check_count(
            len(session.segments) + len(event.segments),
            "segments (limits.max_engine_segments)",
            most=books.limits.max_engine_segments,
        )
        check_count(
            len(session.layouts) + len(event.layouts),
            "layouts (limits.max_layouts)",
            most=books.limits.max_layouts,
        )
        sizes: U64 = np.array([segment.size_bytes for segment in event.segments], dtype=np.uint64)
        for index, layout in enumerate(event.layouts):
            # It has held its pieces to segments of the sizes that it was given: they must be these.
            if not np.array_equal(layout.segment_sizes_bytes, sizes):
                raise InvalidFieldError(
                    f"layouts[{index}] is over segments of {layout.segment_sizes_bytes.tolist()[:8]} bytes; "
                    f"those of the call have {sizes.tolist()[:8]}"
                )
        known = tuple(KnownSegment(books.mint(), segment, session.token) for segment in event.segments)
        layouts = [KnownLayout(books.mint(), layout, known, session.token) for layout in event.layouts]
        books.engine_segments.update((segment.segment_id, segment) for segment in known)
        books.layouts.update((layout.layout_id, layout) for layout in layouts)
        session.segments.update(segment.segment_id for segment in known)
        session.layouts.update(layout.layout_id for layout in layouts)
        return SegmentsAnswer(
            tuple(segment.segment_id for segment in known),
            tuple(layout.layout_id for layout in layouts),
        )

    def unregister(self, event: UnregisterSegments, now: int) -> int:
        """Forget segments that nobody may be reading; answers how many were there."""
        books = self._books
        session = books.session(event.token, now)
        ours = session.segments & set(event.segment_ids.tolist())
        layouts = self._layouts_over(session, ours)
        readers = self._handoffs.readers_of(layouts)
        if readers:
            raise SegmentInUseError(
                f"handoffs {readers[:8]} may be reading segments {sorted(ours)[:8]} now: abort them, and "
                "wait for the notice that they are released"
            )
        self._forget(session, ours, layouts, now)
        return len(ours)

    def close(self, session: Session, now: int) -> None:
        """Forget what a session had registered; its process is gone."""
        self._forget(session, set(session.segments), set(session.layouts), now)

    def _layouts_over(self, session: Session, segments: set[int]) -> set[int]:
        books = self._books
        return {
            layout_id
            for layout_id in session.layouts
            if any(known.segment_id in segments for known in books.layouts[layout_id].used_segments)
        }

    def _forget(self, session: Session, segments: set[int], layouts: set[int], now: int) -> None:
        books = self._books
        self._handoffs.abort_from(layouts, now)
        for layout_id in layouts:
            del books.layouts[layout_id]
        for segment_id in segments:
            del books.engine_segments[segment_id]
        session.segments -= segments
        session.layouts -= layouts
