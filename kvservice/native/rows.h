/*
 * The row table: 64-byte rows, open addressing with linear probing, deletion by
 * backward shift. The layout, the home slot and the write order are drawn in
 * kvservice/core/row_layout.py, whose functions are the reference for these.
 *
 * One writer at a time, which the caller sees to; any number of readers, also
 * in other processes, at the same time.
 */
#ifndef KVSERVICE_ROWS_H
#define KVSERVICE_ROWS_H

#include <stddef.h>
#include <stdint.h>

#define KEY_BYTES 32
#define ROW_BYTES 64
#define GRANULE_BYTES 512

/* Times that a reader looks again at a row that changes under its eyes. More
 * would only wait for a writer that lost its processor. */
#define SEQLOCK_ATTEMPTS 8

struct row {
    uint64_t key[4];
    uint32_t space; /* 0: the row is empty. */
    uint32_t segment;
    uint32_t granule; /* offset / GRANULE_BYTES in the segment */
    uint32_t length;
    uint32_t checksum;
    uint32_t version; /* odd while the writer changes the row */
    uint64_t generation;
};

_Static_assert(sizeof(struct row) == ROW_BYTES, "a row is one cache line");

struct table {
    struct row *rows;
    size_t mask; /* capacity - 1 */
};

/* A key in its batch, loaded into words. */
struct key {
    uint64_t words[4];
    uint32_t space;
};

struct key load_key(const uint8_t *keys, size_t index, uint32_t space);
size_t home_slot(const struct table *table, const struct key *key);
void prefetch_row(const struct table *table, size_t slot);

/* A reader's search: the slot or -1; the row as it was at one moment goes to
 * `snapshot` when found. `slot` is the home slot. */
int64_t find_row(const struct table *table, const struct key *key, size_t slot,
                 struct row *snapshot);

/* A writer's search, which needs no seqlock: the slot or -1. */
int64_t locate_row(const struct table *table, const struct key *key);

/* Puts a row that is known to be absent: 0, or -1 when no row is empty. */
int place_row(const struct table *table, const struct row *row);

/* Removes the row in a slot and closes the gap. */
void erase_row(const struct table *table, size_t slot);

#endif
