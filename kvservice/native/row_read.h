/*
 * The directory read: from keys to copied bytes in one call, without asking the
 * daemon. A row tells where the bytes are; the generation word of the place,
 * looked at before and after the copy, tells whether they stayed.
 */
#ifndef KVSERVICE_ROW_READ_H
#define KVSERVICE_ROW_READ_H

#include "pieces.h"
#include "rows.h"

/* The codes of ReadOutcome in kvservice/core/row_layout.py. */
enum outcome {
    OUTCOME_HIT = 0,
    OUTCOME_MISS = 1,
    OUTCOME_UNMAPPED = 2,
    OUTCOME_STALE = 3,
    OUTCOME_CORRUPT = 4,
    OUTCOME_LENGTH = 5,
};

struct row_read {
    struct table table;
    const uint8_t *keys;
    uint32_t space;
    const uint64_t *segment_bases;
    const uint64_t *generation_bases;
    size_t segment_count;
    struct pieces pieces;
    int is_verified;
    uint64_t streaming_threshold_bytes;
    uint8_t *outcomes;
    int64_t *touched;
};

/* Reads all blocks; returns the number of hits. */
size_t read_rows(const struct row_read *read);

#endif
