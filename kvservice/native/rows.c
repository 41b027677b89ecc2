#include "rows.h"

#include <string.h>

#define KEY_WORDS (KEY_BYTES / 8)

struct key load_key(const uint8_t *keys, size_t index, uint32_t space)
{
    struct key key;
    memcpy(key.words, keys + index * KEY_BYTES, KEY_BYTES);
    key.space = space;
    return key;
}

size_t home_slot(const struct table *table, const struct key *key)
{
    uint64_t mixed = key->space * UINT64_C(0x9E3779B97F4A7C15);
    for (int i = 0; i < KEY_WORDS; i++) {
        mixed = (mixed ^ key->words[i]) * UINT64_C(0xD6E8FEB86659FD93);
        mixed ^= mixed >> 32;
    }
    mixed *= UINT64_C(0xFF51AFD7ED558CCD);
    mixed ^= mixed >> 29;
    mixed *= UINT64_C(0xC4CEB9FE1A85EC53);
    mixed ^= mixed >> 32;
    return (size_t)mixed & table->mask;
}

void prefetch_row(const struct table *table, size_t slot)
{
    __builtin_prefetch(&table->rows[slot]);
}

/* Copies a row as it was at one moment; 0 when it kept changing. */
static int snapshot_row(const struct row *row, struct row *snapshot)
{
    const uint64_t *from = (const uint64_t *)(const void *)row;
    uint64_t words[ROW_BYTES / 8];
    for (int attempt = 0; attempt < SEQLOCK_ATTEMPTS; attempt++) {
        uint32_t version = __atomic_load_n(&row->version, __ATOMIC_ACQUIRE);
        if (version & 1) {
            continue;
        }
        for (int i = 0; i < ROW_BYTES / 8; i++) {
            words[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&row->version, __ATOMIC_RELAXED) == version) {
            memcpy(snapshot, words, ROW_BYTES);
            return 1;
        }
    }
    return 0;
}

static int is_same_key(const struct row *row, const struct key *key)
{
    return row->key[0] == key->words[0] && row->key[1] == key->words[1] &&
           row->key[2] == key->words[2] && row->key[3] == key->words[3] &&
           row->space == key->space;
}

int64_t find_row(const struct table *table, const struct key *key, size_t slot,
                 struct row *snapshot)
{
    for (size_t step = 0; step <= table->mask; step++) {
        if (!snapshot_row(&table->rows[slot], snapshot) || snapshot->space == 0) {
            return -1;
        }
        if (is_same_key(snapshot, key)) {
            return (int64_t)slot;
        }
        slot = (slot + 1) & table->mask;
    }
    return -1;
}

int64_t locate_row(const struct table *table, const struct key *key)
{
    size_t slot = home_slot(table, key);
    for (size_t step = 0; step <= table->mask; step++) {
        const struct row *row = &table->rows[slot];
        if (row->space == 0) {
            return -1;
        }
        if (is_same_key(row, key)) {
            return (int64_t)slot;
        }
        slot = (slot + 1) & table->mask;
    }
    return -1;
}

/* Gives a slot another body under its seqlock. */
static void write_row(struct row *row, const struct row *body)
{
    uint32_t version = row->version;
    const uint32_t *halves = (const uint32_t *)(const void *)body;
    uint32_t *to = (uint32_t *)(void *)row;
    const size_t version_half = offsetof(struct row, version) / 4;
    __atomic_store_n(&row->version, version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (size_t i = 0; i < ROW_BYTES / 4; i++) {
        if (i != version_half) {
            __atomic_store_n(&to[i], halves[i], __ATOMIC_RELAXED);
        }
    }
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&row->version, version + 2, __ATOMIC_RELAXED);
}

static size_t row_home(const struct table *table, const struct row *row)
{
    struct key key;
    memcpy(key.words, row->key, KEY_BYTES);
    key.space = row->space;
    return home_slot(table, &key);
}

int place_row(const struct table *table, const struct row *row)
{
    size_t slot = row_home(table, row);
    for (size_t step = 0; step <= table->mask; step++) {
        if (table->rows[slot].space == 0) {
            write_row(&table->rows[slot], row);
            return 0;
        }
        slot = (slot + 1) & table->mask;
    }
    return -1;
}

void erase_row(const struct table *table, size_t slot)
{
    static const struct row empty;
    size_t hole = slot;
    for (size_t step = 1; step <= table->mask; step++) {
        size_t next = (slot + step) & table->mask;
        const struct row *row = &table->rows[next];
        if (row->space == 0) {
            break;
        }
        /* A row may fill the hole when the hole lies between its home and its
         * place, that is, when its distance from home reaches that far. */
        size_t from_home = (next - row_home(table, row)) & table->mask;
        size_t from_hole = (next - hole) & table->mask;
        if (from_home >= from_hole) {
            write_row(&table->rows[hole], row);
            hole = next;
        }
    }
    write_row(&table->rows[hole], &empty);
}
