#include "row_calls.h"

#include "row_read.h"
#include "rows.h"

#include <stdlib.h>
#include <string.h>

/* Rows asked for at once by a search: about what a core keeps in flight. */
#define FIND_BATCH 16

/* Enough for the u32 row counts of a batch's own duplicate check. */
#define BATCH_KEYS_MAX (UINT64_C(1) << 30)

static int take_table(PyObject *object, PyObject *capacity, const char *name,
                      int is_writable, struct array *array, struct table *table)
{
    uint64_t rows;
    if (take_unsigned(capacity, "capacity", UINT32_MAX, &rows) < 0 ||
        take_array(object, name, (struct array_rule){KIND_BYTES, is_writable, 0},
                   array) < 0) {
        return -1;
    }
    if (rows == 0 || (rows & (rows - 1)) != 0) {
        PyErr_Format(PyExc_ValueError, "capacity must be a power of two, not %llu",
                     (unsigned long long)rows);
        return -1;
    }
    if ((uint64_t)array->count < rows * ROW_BYTES ||
        (uintptr_t)array->items % 8 != 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be 8-byte aligned and hold %llu rows of %d bytes",
                     name, (unsigned long long)rows, ROW_BYTES);
        return -1;
    }
    table->rows = array->items;
    table->mask = (size_t)rows - 1;
    return 0;
}

/* The number of keys, or -1. */
static Py_ssize_t take_keys(PyObject *object, struct array *array)
{
    if (take_array(object, "keys", (struct array_rule){KIND_BYTES, 0, 0},
                   array) < 0) {
        return -1;
    }
    if (array->count % KEY_BYTES != 0 ||
        (uint64_t)array->count / KEY_BYTES > BATCH_KEYS_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "keys must be a multiple of %d bytes, not %zd", KEY_BYTES,
                     array->count);
        return -1;
    }
    return array->count / KEY_BYTES;
}

static int take_space(PyObject *object, uint32_t *space)
{
    uint64_t value;
    if (take_unsigned(object, "space", UINT32_MAX, &value) < 0) {
        return -1;
    }
    if (value == 0) {
        PyErr_SetString(PyExc_ValueError, "space must not be 0: it marks empty rows");
        return -1;
    }
    *space = (uint32_t)value;
    return 0;
}

static size_t find_rows(const struct table *table, const uint8_t *keys,
                        size_t count, uint32_t space, int64_t *positions)
{
    size_t leading = 0;
    int is_leading = 1;
    for (size_t start = 0; start < count; start += FIND_BATCH) {
        size_t end = count - start < FIND_BATCH ? count : start + FIND_BATCH;
        size_t homes[FIND_BATCH];
        for (size_t i = start; i < end; i++) {
            struct key key = load_key(keys, i, space);
            homes[i - start] = home_slot(table, &key);
            prefetch_row(table, homes[i - start]);
        }
        for (size_t i = start; i < end; i++) {
            struct key key = load_key(keys, i, space);
            struct row row;
            positions[i] = find_row(table, &key, homes[i - start], &row);
            is_leading = is_leading && positions[i] >= 0;
            leading += (size_t)is_leading;
        }
    }
    return leading;
}

PyObject *call_find_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {"table", "capacity",  "keys",
                                        "space", "positions", NULL};
    static const struct signature signature = {"find_rows", names, 5};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[3] = {0};
    struct table table;
    uint32_t space;
    Py_ssize_t keys = -1;
    size_t leading = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0 ||
        take_space(values[3], &space) < 0) {
        return NULL;
    }
    int is_taken =
        take_table(values[0], values[1], "table", 0, &arrays[0], &table) == 0 &&
        (keys = take_keys(values[2], &arrays[1])) >= 0 &&
        take_array(values[4], "positions", (struct array_rule){KIND_I64, 1, 0},
                   &arrays[2]) == 0 &&
        require_count(&arrays[2], "positions", keys) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        leading = find_rows(&table, arrays[1].items, (size_t)keys, space,
                            arrays[2].items);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 3);
    return is_taken ? PyLong_FromSize_t(leading) : NULL;
}

/* A batch to insert. */
struct insertion {
    struct table table;
    const uint8_t *keys;
    size_t count;
    uint32_t space;
    uint32_t length;
    const uint32_t *segments;
    const uint32_t *granules;
    const uint32_t *checksums;
    const uint64_t *generations;
};

enum refusal { REFUSED_NOT, REFUSED_PRESENT, REFUSED_FULL, REFUSED_MEMORY };

/* Finds a key that is in the table or twice in the batch, before anything is
 * written. The batch's own keys go into a scratch table of their indices. */
static enum refusal check_absent(const struct insertion *insertion, size_t *index)
{
    size_t slots = 2;
    while (slots < 2 * insertion->count) {
        slots *= 2;
    }
    uint32_t *seen = calloc(slots, sizeof(*seen)); /* index + 1; 0: empty. */
    if (seen == NULL) {
        return REFUSED_MEMORY;
    }
    const struct table scratch = {NULL, slots - 1};
    enum refusal refusal = REFUSED_NOT;
    for (size_t i = 0; i < insertion->count && refusal == REFUSED_NOT; i++) {
        struct key key = load_key(insertion->keys, i, insertion->space);
        size_t slot = home_slot(&scratch, &key);
        while (seen[slot] != 0 &&
               memcmp(insertion->keys + (size_t)(seen[slot] - 1) * KEY_BYTES,
                      key.words, KEY_BYTES) != 0) {
            slot = (slot + 1) & scratch.mask;
        }
        if (seen[slot] != 0 || locate_row(&insertion->table, &key) >= 0) {
            refusal = REFUSED_PRESENT;
            *index = i;
        }
        seen[slot] = (uint32_t)i + 1;
    }
    free(seen);
    return refusal;
}

static enum refusal insert_rows(const struct insertion *insertion, size_t *index)
{
    enum refusal refusal = check_absent(insertion, index);
    for (size_t i = 0; i < insertion->count && refusal == REFUSED_NOT; i++) {
        struct row row = {
            .space = insertion->space,
            .segment = insertion->segments[i],
            .granule = insertion->granules[i],
            .length = insertion->length,
            .checksum = insertion->checksums[i],
            .generation = insertion->generations[i],
        };
        memcpy(row.key, insertion->keys + i * KEY_BYTES, KEY_BYTES);
        if (place_row(&insertion->table, &row) < 0) {
            refusal = REFUSED_FULL;
            *index = i;
        }
    }
    if (refusal == REFUSED_FULL) {
        /* All or nothing: take back what went in, last first. */
        for (size_t i = *index; i-- > 0;) {
            struct key key = load_key(insertion->keys, i, insertion->space);
            erase_row(&insertion->table,
                      (size_t)locate_row(&insertion->table, &key));
        }
    }
    return refusal;
}

static int take_insertion(PyObject **values, struct array arrays[6],
                          struct insertion *insertion)
{
    const struct array_rule u32 = {KIND_U32, 0, 0};
    const struct array_rule u64 = {KIND_U64, 0, 0};
    uint64_t length;
    Py_ssize_t keys;
    if (take_space(values[3], &insertion->space) < 0 ||
        take_unsigned(values[6], "length", UINT32_MAX, &length) < 0 ||
        take_table(values[0], values[1], "table", 1, &arrays[0],
                   &insertion->table) < 0 ||
        (keys = take_keys(values[2], &arrays[1])) < 0 ||
        take_array(values[4], "segments", u32, &arrays[2]) < 0 ||
        take_array(values[5], "granules", u32, &arrays[3]) < 0 ||
        take_array(values[7], "checksums", u32, &arrays[4]) < 0 ||
        take_array(values[8], "generations", u64, &arrays[5]) < 0 ||
        require_count(&arrays[2], "segments", keys) < 0 ||
        require_count(&arrays[3], "granules", keys) < 0 ||
        require_count(&arrays[4], "checksums", keys) < 0 ||
        require_count(&arrays[5], "generations", keys) < 0) {
        return -1;
    }
    insertion->keys = arrays[1].items;
    insertion->count = (size_t)keys;
    insertion->length = (uint32_t)length;
    insertion->segments = arrays[2].items;
    insertion->granules = arrays[3].items;
    insertion->checksums = arrays[4].items;
    insertion->generations = arrays[5].items;
    return 0;
}

static PyObject *raise_refusal(enum refusal refusal, size_t index)
{
    if (refusal == REFUSED_MEMORY) {
        return PyErr_NoMemory();
    }
    return PyErr_Format(PyExc_ValueError,
                        refusal == REFUSED_PRESENT
                            ? "key %zu is present already; nothing was inserted"
                            : "no empty row for key %zu; nothing was inserted",
                        index);
}

PyObject *call_insert_rows(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {
        "table",    "capacity", "keys",      "space",       "segments",
        "granules", "length",   "checksums", "generations", NULL};
    static const struct signature signature = {"insert_rows", names, 9};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[6] = {0};
    struct insertion insertion = {0};
    enum refusal refusal = REFUSED_NOT;
    size_t index = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken = take_insertion(values, arrays, &insertion) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        refusal = insert_rows(&insertion, &index);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 6);
    if (!is_taken) {
        return NULL;
    }
    return refusal == REFUSED_NOT ? Py_NewRef(Py_None)
                                  : raise_refusal(refusal, index);
}

static size_t remove_rows(const struct table *table, const uint8_t *keys,
                          const uint32_t *spaces, size_t count)
{
    size_t removed = 0;
    for (size_t i = 0; i < count; i++) {
        struct key key = load_key(keys, i, spaces[i]);
        int64_t slot = spaces[i] ? locate_row(table, &key) : -1;
        if (slot >= 0) {
            erase_row(table, (size_t)slot);
            removed++;
        }
    }
    return removed;
}

PyObject *call_remove_rows(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {"table", "capacity", "keys", "spaces",
                                        NULL};
    static const struct signature signature = {"remove_rows", names, 4};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[3] = {0};
    struct table table;
    Py_ssize_t keys = -1;
    size_t removed = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken =
        take_table(values[0], values[1], "table", 1, &arrays[0], &table) == 0 &&
        (keys = take_keys(values[2], &arrays[1])) >= 0 &&
        take_array(values[3], "spaces", (struct array_rule){KIND_U32, 0, 0},
                   &arrays[2]) == 0 &&
        require_count(&arrays[2], "spaces", keys) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        removed = remove_rows(&table, arrays[1].items, arrays[2].items,
                              (size_t)keys);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 3);
    return is_taken ? PyLong_FromSize_t(removed) : NULL;
}

static int copy_rows(const struct table *source, const struct table *target)
{
    for (size_t slot = 0; slot <= source->mask; slot++) {
        const struct row *row = &source->rows[slot];
        if (row->space != 0 && place_row(target, row) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *call_copy_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {"source_table", "source_capacity",
                                        "target_table", "target_capacity", NULL};
    static const struct signature signature = {"copy_rows", names, 4};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[2] = {0};
    struct table source, target;
    int is_full = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken = take_table(values[0], values[1], "source_table", 0, &arrays[0],
                              &source) == 0 &&
                   take_table(values[2], values[3], "target_table", 1, &arrays[1],
                              &target) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        is_full = copy_rows(&source, &target) < 0;
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 2);
    if (is_full) {
        PyErr_SetString(PyExc_ValueError, "no empty row left in target_table");
        return NULL;
    }
    return is_taken ? Py_NewRef(Py_None) : NULL;
}

/* Places of read_rows' arrays: lengths and piece counts come first, as
 * take_lengths fills them. */
enum read_array {
    AT_LENGTHS,
    AT_PIECE_COUNTS,
    AT_TABLE,
    AT_KEYS,
    AT_SEGMENT_BASES,
    AT_GENERATION_BASES,
    AT_TARGETS,
    AT_OUTCOMES,
    AT_TOUCHED,
    READ_ARRAYS,
};

static int take_read_arrays(PyObject **values, struct array *arrays,
                            struct row_read *read)
{
    const struct array_rule u64 = {KIND_U64, 0, 0};
    if (take_lengths(values[7], values[8], arrays, &read->pieces) < 0 ||
        take_array(values[4], "segment_bases", u64, &arrays[AT_SEGMENT_BASES]) < 0 ||
        take_array(values[5], "generation_bases", u64,
                   &arrays[AT_GENERATION_BASES]) < 0 ||
        take_array(values[6], "targets", u64, &arrays[AT_TARGETS]) < 0 ||
        take_array(values[11], "outcomes", (struct array_rule){KIND_U8, 1, 0},
                   &arrays[AT_OUTCOMES]) < 0 ||
        take_array(values[12], "touched", (struct array_rule){KIND_I64, 1, 0},
                   &arrays[AT_TOUCHED]) < 0) {
        return -1;
    }
    read->segment_bases = arrays[AT_SEGMENT_BASES].items;
    read->generation_bases = arrays[AT_GENERATION_BASES].items;
    read->segment_count = (size_t)arrays[AT_SEGMENT_BASES].count;
    read->pieces.targets = arrays[AT_TARGETS].items;
    read->outcomes = arrays[AT_OUTCOMES].items;
    read->touched = arrays[AT_TOUCHED].items;
    return 0;
}

static int take_read(PyObject **values, struct array *arrays,
                     struct row_read *read)
{
    Py_ssize_t keys;
    if (take_space(values[3], &read->space) < 0 ||
        (read->is_verified = PyObject_IsTrue(values[9])) < 0 ||
        take_threshold(values[10], &read->streaming_threshold_bytes) < 0 ||
        take_table(values[0], values[1], "table", 0, &arrays[AT_TABLE],
                   &read->table) < 0 ||
        (keys = take_keys(values[2], &arrays[AT_KEYS])) < 0 ||
        take_read_arrays(values, arrays, read) < 0) {
        return -1;
    }
    read->keys = arrays[AT_KEYS].items;
    if ((Py_ssize_t)read->pieces.block_count != keys) {
        PyErr_Format(PyExc_ValueError, "%s must have %zd items, not %zu",
                     read->pieces.counts ? "piece_counts" : "lengths", keys,
                     read->pieces.block_count);
        return -1;
    }
    if (require_count(&arrays[AT_GENERATION_BASES], "generation_bases",
                      arrays[AT_SEGMENT_BASES].count) < 0 ||
        require_count(&arrays[AT_TARGETS], "targets",
                      (Py_ssize_t)read->pieces.piece_count) < 0 ||
        require_count(&arrays[AT_OUTCOMES], "outcomes", keys) < 0) {
        return -1;
    }
    return require_count(&arrays[AT_TOUCHED], "touched", keys);
}

PyObject *call_read_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {
        "table",   "capacity", "keys",         "space",
        "segment_bases", "generation_bases", "targets", "lengths",
        "piece_counts",  "verify", "streaming_threshold_bytes", "outcomes",
        "touched", NULL};
    static const struct signature signature = {"read_rows", names, 13};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[READ_ARRAYS] = {0};
    struct row_read read = {0};
    size_t hits = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken = take_read(values, arrays, &read) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        hits = read_rows(&read);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, READ_ARRAYS);
    return is_taken ? PyLong_FromSize_t(hits) : NULL;
}
