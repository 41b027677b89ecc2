#include "slot_copy.h"

#include "kernel.h"

#define GRANULE_BYTES 512u
#define SLOT_ARRAYS 10

struct slot_copy {
    const uint32_t *segments;
    const uint32_t *granules;
    const uint64_t *generations;
    const uint64_t *segment_bases; /* 0: not mapped. */
    const uint64_t *segment_sizes;
    const uint64_t *generation_bases;
    size_t segment_count;
    struct pieces pieces; /* `targets` are the caller's pieces either way. */
    uint32_t *checksums;
    int is_write;
    uint64_t threshold_bytes;
};

static const uint64_t *generation_word(const struct slot_copy *copy, size_t slot)
{
    return (const uint64_t *)(uintptr_t)(
        copy->generation_bases[copy->segments[slot]] +
        8 * (uint64_t)copy->granules[slot]);
}

static uint64_t slot_bytes(const struct slot_copy *copy, size_t slot, size_t piece)
{
    uint64_t bytes = 0;
    for (size_t left = block_pieces(&copy->pieces, slot); left != 0; left--) {
        bytes += copy->pieces.lengths[piece++];
    }
    return bytes;
}

/* All slots are looked at before the first byte moves. */
static enum slot_outcome check_before(const struct slot_copy *copy, size_t *slot)
{
    size_t piece = 0;
    for (*slot = 0; *slot < copy->pieces.block_count; (*slot)++) {
        uint32_t segment = copy->segments[*slot];
        if (segment >= copy->segment_count || copy->segment_bases[segment] == 0) {
            return SLOT_UNMAPPED;
        }
        uint64_t offset = (uint64_t)copy->granules[*slot] * GRANULE_BYTES;
        uint64_t bytes = slot_bytes(copy, *slot, piece);
        uint64_t size = copy->segment_sizes[segment];
        /* Two comparisons, since the sum of a wrong offset and length may wrap. */
        if (bytes > size || offset > size - bytes) {
            return SLOT_OUTSIDE;
        }
        if (__atomic_load_n(generation_word(copy, *slot), __ATOMIC_ACQUIRE) !=
            copy->generations[*slot]) {
            return SLOT_STALE;
        }
        piece += block_pieces(&copy->pieces, *slot);
    }
    return SLOTS_COPIED;
}

static void move_bytes(const struct slot_copy *copy)
{
    size_t piece = 0;
    for (size_t slot = 0; slot < copy->pieces.block_count; slot++) {
        uint32_t state = ~0u;
        uint64_t place = copy->segment_bases[copy->segments[slot]] +
                         (uint64_t)copy->granules[slot] * GRANULE_BYTES;
        for (size_t left = block_pieces(&copy->pieces, slot); left != 0; left--) {
            uint64_t mine = copy->pieces.targets[piece];
            uint64_t bytes = copy->pieces.lengths[piece++];
            copy_piece(copy->checksums ? &state : NULL,
                       copy->is_write ? place : mine,
                       copy->is_write ? mine : place, bytes,
                       copy->threshold_bytes);
            place += bytes;
        }
        if (copy->checksums != NULL) {
            copy->checksums[slot] = ~state;
        }
    }
    active_kernel->end_streaming();
}

static enum slot_outcome copy_slots(const struct slot_copy *copy, size_t *slot)
{
    enum slot_outcome outcome = check_before(copy, slot);
    if (outcome != SLOTS_COPIED) {
        return outcome;
    }
    move_bytes(copy);
    /* The second look must come after every load and store of the copy. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (*slot = 0; *slot < copy->pieces.block_count; (*slot)++) {
        if (__atomic_load_n(generation_word(copy, *slot), __ATOMIC_RELAXED) !=
            copy->generations[*slot]) {
            return SLOT_MOVED;
        }
    }
    *slot = 0;
    return SLOTS_COPIED;
}

static int take_slot_copy(PyObject **values, struct array arrays[SLOT_ARRAYS],
                          struct slot_copy *copy)
{
    const struct array_rule u32 = {KIND_U32, 0, 0};
    const struct array_rule u64 = {KIND_U64, 0, 0};
    const struct array_rule sums = {KIND_U32, 1, 1};
    if (take_lengths(values[7], values[8], arrays, &copy->pieces) < 0 ||
        take_array(values[0], "segments", u32, &arrays[2]) < 0 ||
        take_array(values[1], "granules", u32, &arrays[3]) < 0 ||
        take_array(values[2], "generations", u64, &arrays[4]) < 0 ||
        take_array(values[3], "segment_bases", u64, &arrays[5]) < 0 ||
        take_array(values[4], "segment_sizes", u64, &arrays[6]) < 0 ||
        take_array(values[5], "generation_bases", u64, &arrays[7]) < 0 ||
        take_array(values[6], "addresses", u64, &arrays[8]) < 0 ||
        take_array(values[9], "checksums", sums, &arrays[9]) < 0) {
        return -1;
    }
    Py_ssize_t blocks = (Py_ssize_t)copy->pieces.block_count;
    if (require_count(&arrays[2], "segments", blocks) < 0 ||
        require_count(&arrays[3], "granules", blocks) < 0 ||
        require_count(&arrays[4], "generations", blocks) < 0 ||
        require_count(&arrays[6], "segment_sizes", arrays[5].count) < 0 ||
        require_count(&arrays[7], "generation_bases", arrays[5].count) < 0 ||
        require_count(&arrays[8], "addresses", (Py_ssize_t)copy->pieces.piece_count) < 0 ||
        (arrays[9].is_held && require_count(&arrays[9], "checksums", blocks) < 0)) {
        return -1;
    }
    copy->segments = arrays[2].items;
    copy->granules = arrays[3].items;
    copy->generations = arrays[4].items;
    copy->segment_bases = arrays[5].items;
    copy->segment_count = (size_t)arrays[5].count;
    copy->segment_sizes = arrays[6].items;
    copy->generation_bases = arrays[7].items;
    copy->pieces.targets = arrays[8].items;
    copy->checksums = arrays[9].items;
    copy->is_write = PyObject_IsTrue(values[10]);
    return copy->is_write < 0 ? -1 : take_threshold(values[11], &copy->threshold_bytes);
}

PyObject *call_copy_slots(PyObject *module, PyObject *const *args,
                          Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {
        "segments",      "granules",         "generations", "segment_bases",
        "segment_sizes", "generation_bases", "addresses",   "lengths",
        "piece_counts",  "checksums",        "is_write",
        "streaming_threshold_bytes", NULL};
    static const struct signature signature = {"copy_slots", names, 11};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[SLOT_ARRAYS] = {0};
    struct slot_copy copy = {0};
    enum slot_outcome outcome = SLOTS_COPIED;
    size_t slot = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken = take_slot_copy(values, arrays, &copy) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        outcome = copy_slots(&copy, &slot);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, SLOT_ARRAYS);
    return is_taken ? Py_BuildValue("(in)", (int)outcome, (Py_ssize_t)slot) : NULL;
}
