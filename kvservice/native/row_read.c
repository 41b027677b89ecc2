#include "row_read.h"

#include "kernel.h"

/* Keys whose home rows are asked for ahead of their turn: enough to hide one
 * memory access behind the copies, few enough not to push the copies' own
 * lines out. */
#define LOOKAHEAD_KEYS 8

/* A block's turn: its pieces start at `piece`. */
struct turn {
    size_t piece;
    size_t piece_count;
};

static uint64_t block_bytes(const struct row_read *read, struct turn turn)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < turn.piece_count; i++) {
        bytes += read->pieces.lengths[turn.piece + i];
    }
    return bytes;
}

/* Scatters the block's bytes; returns their checksum, or 0 when unverified. */
static uint32_t copy_block(const struct row_read *read, struct turn turn,
                           uint64_t source)
{
    uint32_t state = ~0u;
    for (size_t i = turn.piece; i < turn.piece + turn.piece_count; i++) {
        copy_piece(read->is_verified ? &state : NULL, read->pieces.targets[i],
                   source, read->pieces.lengths[i],
                   read->streaming_threshold_bytes);
        source += read->pieces.lengths[i];
    }
    return ~state;
}

static enum outcome read_block(const struct row_read *read, struct turn turn,
                               const struct row *row)
{
    if (row->length != block_bytes(read, turn)) {
        return OUTCOME_LENGTH;
    }
    if (row->segment >= read->segment_count ||
        read->segment_bases[row->segment] == 0) {
        return OUTCOME_UNMAPPED;
    }
    const uint64_t *generation =
        (const uint64_t *)(uintptr_t)(read->generation_bases[row->segment] +
                                      8 * (uint64_t)row->granule);
    if (__atomic_load_n(generation, __ATOMIC_ACQUIRE) != row->generation) {
        return OUTCOME_MISS;
    }
    uint64_t source = read->segment_bases[row->segment] +
                      (uint64_t)row->granule * GRANULE_BYTES;
    uint32_t checksum = copy_block(read, turn, source);
    /* The second look must come after every load of the copy. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(generation, __ATOMIC_RELAXED) != row->generation) {
        return OUTCOME_STALE;
    }
    /* A stored 0 means "none"; a checksum of 0 is stored as all ones. */
    if (read->is_verified && row->checksum != 0 &&
        row->checksum != (checksum != 0 ? checksum : UINT32_MAX)) {
        return OUTCOME_CORRUPT;
    }
    return OUTCOME_HIT;
}

size_t read_rows(const struct row_read *read)
{
    size_t count = read->pieces.block_count;
    size_t homes[LOOKAHEAD_KEYS];
    size_t hits = 0;
    struct turn turn = {0, 0};
    for (size_t ahead = 0; ahead < count + LOOKAHEAD_KEYS; ahead++) {
        /* The block's turn comes LOOKAHEAD_KEYS after its row was asked for,
         * just before its place in `homes` is used again. */
        if (ahead >= LOOKAHEAD_KEYS) {
            size_t block = ahead - LOOKAHEAD_KEYS;
            struct key key = load_key(read->keys, block, read->space);
            struct row row;
            int64_t slot = find_row(&read->table, &key,
                                    homes[block % LOOKAHEAD_KEYS], &row);
            turn.piece += turn.piece_count;
            turn.piece_count = block_pieces(&read->pieces, block);
            enum outcome outcome =
                slot < 0 ? OUTCOME_MISS : read_block(read, turn, &row);
            read->outcomes[block] = (uint8_t)outcome;
            read->touched[block] = outcome == OUTCOME_HIT ? slot : -1;
            hits += outcome == OUTCOME_HIT;
        }
        if (ahead < count) {
            struct key key = load_key(read->keys, ahead, read->space);
            homes[ahead % LOOKAHEAD_KEYS] = home_slot(&read->table, &key);
            prefetch_row(&read->table, homes[ahead % LOOKAHEAD_KEYS]);
        }
    }
    active_kernel->end_streaming();
    return hits;
}
