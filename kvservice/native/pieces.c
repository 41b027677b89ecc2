#include "pieces.h"

#include "kernel.h"

#include <string.h>

/* Below this a sum is over sooner than the GIL is given up and taken again. */
#define GIL_KEPT_BYTES 4096

size_t block_pieces(const struct pieces *pieces, size_t block)
{
    return pieces->counts ? pieces->counts[block] : 1;
}

void copy_piece(uint32_t *state, uint64_t target, uint64_t source,
                uint64_t bytes, uint64_t streaming_threshold_bytes)
{
    uint8_t *to = (uint8_t *)(uintptr_t)target;
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    if (bytes == 0) {
        return; /* The address of an empty piece may be anything. */
    }
    int is_streaming = bytes >= streaming_threshold_bytes;
    if (state == NULL) {
        if (is_streaming) {
            active_kernel->copy_streaming(to, from, bytes);
        } else {
            memcpy(to, from, bytes);
        }
    } else if (is_streaming) {
        *state = active_kernel->copy_sum_streaming(*state, to, from, bytes);
    } else {
        *state = active_kernel->copy_sum(*state, to, from, bytes);
    }
}

static void copy_blocks(const struct pieces *pieces, uint32_t *checksums,
                        uint64_t threshold_bytes)
{
    size_t piece = 0;
    for (size_t block = 0; block < pieces->block_count; block++) {
        uint32_t state = ~0u;
        for (size_t left = block_pieces(pieces, block); left != 0; left--) {
            copy_piece(checksums ? &state : NULL, pieces->targets[piece],
                       pieces->sources[piece], pieces->lengths[piece],
                       threshold_bytes);
            piece++;
        }
        if (checksums != NULL) {
            checksums[block] = ~state;
        }
    }
    active_kernel->end_streaming();
}

static void sum_blocks(const struct pieces *pieces, uint32_t *checksums)
{
    size_t piece = 0;
    for (size_t block = 0; block < pieces->block_count; block++) {
        uint32_t state = ~0u;
        for (size_t left = block_pieces(pieces, block); left != 0; left--) {
            if (pieces->lengths[piece] != 0) {
                state = active_kernel->sum(
                    state, (const uint8_t *)(uintptr_t)pieces->sources[piece],
                    pieces->lengths[piece]);
            }
            piece++;
        }
        checksums[block] = ~state;
    }
}

int take_lengths(PyObject *lengths, PyObject *counts, struct array *arrays,
                 struct pieces *pieces)
{
    const struct array_rule u64 = {KIND_U64, 0, 0};
    const struct array_rule u32_or_none = {KIND_U32, 0, 1};
    if (take_array(lengths, "lengths", u64, &arrays[0]) < 0 ||
        take_array(counts, "piece_counts", u32_or_none, &arrays[1]) < 0) {
        return -1;
    }
    pieces->lengths = arrays[0].items;
    pieces->piece_count = (size_t)arrays[0].count;
    pieces->block_count = pieces->piece_count;
    if (counts == Py_None) {
        return 0;
    }
    pieces->counts = arrays[1].items;
    pieces->block_count = (size_t)arrays[1].count;
    uint64_t total = 0;
    for (size_t i = 0; i < pieces->block_count; i++) {
        total += pieces->counts[i];
    }
    if (total != pieces->piece_count) {
        PyErr_Format(PyExc_ValueError,
                     "piece_counts must add up to the %zu lengths, not to %llu",
                     pieces->piece_count, (unsigned long long)total);
        return -1;
    }
    return 0;
}

int take_threshold(PyObject *object, uint64_t *threshold_bytes)
{
    *threshold_bytes = STREAMING_THRESHOLD_BYTES;
    if (object == NULL) {
        return 0;
    }
    return take_unsigned(object, "streaming_threshold_bytes", UINT64_MAX,
                         threshold_bytes);
}

PyObject *call_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t count,
                      PyObject *keyword_names)
{
    static const char *const names[] = {"buffer", "value", NULL};
    static const struct signature signature = {"crc32c", names, 1};
    PyObject *values[ARGUMENTS_MAX];
    struct array buffer = {0};
    uint64_t value = 0;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0 ||
        (values[1] && take_unsigned(values[1], "value", UINT32_MAX, &value) < 0) ||
        take_array(values[0], "buffer", (struct array_rule){KIND_BYTES, 0, 0},
                   &buffer) < 0) {
        return NULL;
    }
    uint32_t state = ~(uint32_t)value;
    if (buffer.count < GIL_KEPT_BYTES) {
        state = active_kernel->sum(state, buffer.items, (size_t)buffer.count);
    } else {
        Py_BEGIN_ALLOW_THREADS
        state = active_kernel->sum(state, buffer.items, (size_t)buffer.count);
        Py_END_ALLOW_THREADS
    }
    release_arrays(&buffer, 1);
    return PyLong_FromUnsignedLong(~state);
}

static int take_copy(PyObject **values, struct array arrays[5],
                     struct pieces *pieces)
{
    const struct array_rule u64 = {KIND_U64, 0, 0};
    if (take_lengths(values[2], values[3], arrays, pieces) < 0 ||
        take_array(values[0], "targets", u64, &arrays[2]) < 0 ||
        take_array(values[1], "sources", u64, &arrays[3]) < 0 ||
        take_array(values[4], "checksums",
                   (struct array_rule){KIND_U32, 1, 1}, &arrays[4]) < 0 ||
        require_count(&arrays[2], "targets", (Py_ssize_t)pieces->piece_count) < 0 ||
        require_count(&arrays[3], "sources", (Py_ssize_t)pieces->piece_count) < 0) {
        return -1;
    }
    pieces->targets = arrays[2].items;
    pieces->sources = arrays[3].items;
    if (!arrays[4].is_held) {
        return 0;
    }
    return require_count(&arrays[4], "checksums", (Py_ssize_t)pieces->block_count);
}

PyObject *call_copy_blocks(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {
        "targets",   "sources", "lengths", "piece_counts",
        "checksums", "streaming_threshold_bytes", NULL};
    static const struct signature signature = {"copy_blocks", names, 5};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[5] = {0};
    struct pieces pieces = {0};
    uint64_t threshold_bytes;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0 ||
        take_threshold(values[5], &threshold_bytes) < 0) {
        return NULL;
    }
    int is_taken = take_copy(values, arrays, &pieces) == 0;
    if (is_taken) {
        Py_BEGIN_ALLOW_THREADS
        copy_blocks(&pieces, arrays[4].items, threshold_bytes);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 5);
    return is_taken ? Py_NewRef(Py_None) : NULL;
}

PyObject *call_checksum_blocks(PyObject *module, PyObject *const *args,
                               Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {"sources", "lengths", "piece_counts",
                                        "checksums", NULL};
    static const struct signature signature = {"checksum_blocks", names, 4};
    PyObject *values[ARGUMENTS_MAX];
    struct array arrays[4] = {0};
    struct pieces pieces = {0};
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_taken =
        take_lengths(values[1], values[2], arrays, &pieces) == 0 &&
        take_array(values[0], "sources", (struct array_rule){KIND_U64, 0, 0},
                   &arrays[2]) == 0 &&
        take_array(values[3], "checksums", (struct array_rule){KIND_U32, 1, 0},
                   &arrays[3]) == 0 &&
        require_count(&arrays[2], "sources", (Py_ssize_t)pieces.piece_count) == 0 &&
        require_count(&arrays[3], "checksums", (Py_ssize_t)pieces.block_count) == 0;
    if (is_taken) {
        pieces.sources = arrays[2].items;
        Py_BEGIN_ALLOW_THREADS
        sum_blocks(&pieces, arrays[3].items);
        Py_END_ALLOW_THREADS
    }
    release_arrays(arrays, 4);
    return is_taken ? Py_NewRef(Py_None) : NULL;
}

PyObject *call_buffer_address(PyObject *module, PyObject *const *args,
                              Py_ssize_t count, PyObject *keyword_names)
{
    static const char *const names[] = {"obj", "writable", NULL};
    static const struct signature signature = {"buffer_address", names, 2};
    PyObject *values[ARGUMENTS_MAX];
    Py_buffer view;
    (void)module;
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    int is_writable = PyObject_IsTrue(values[1]);
    if (is_writable < 0) {
        return NULL;
    }
    if (!PyObject_CheckBuffer(values[0])) {
        PyErr_Format(PyExc_TypeError, "obj must support the buffer protocol, not %s",
                     Py_TYPE(values[0])->tp_name);
        return NULL;
    }
    /* Asked for with strides, so that each refusal can have its own words. */
    if (PyObject_GetBuffer(values[0], &view, PyBUF_STRIDED_RO) < 0) {
        return NULL;
    }
    PyObject *answer = NULL;
    if (!PyBuffer_IsContiguous(&view, 'C')) {
        PyErr_SetString(PyExc_BufferError, "obj must be C-contiguous");
    } else if (is_writable && view.readonly) {
        PyErr_SetString(PyExc_BufferError, "obj must be writable, but is read-only");
    } else {
        answer = Py_BuildValue("(Kn)", (unsigned long long)(uintptr_t)view.buf,
                               view.len);
    }
    PyBuffer_Release(&view);
    return answer;
}
