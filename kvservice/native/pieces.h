/*
 * Blocks made of pieces: consecutive runs of memory, given by address and
 * length. Whoever calls owns the memory and keeps it mapped.
 */
#ifndef KVSERVICE_PIECES_H
#define KVSERVICE_PIECES_H

#include "arguments.h"

/* Pieces of this many bytes and more are copied with non-temporal stores.
 *
 * Measured on a Sapphire Rapids (2 MiB of L2, 300 MiB of L3), calls of 64 pieces
 * drawn at random from 1 GiB, plain copies, medians of 9 rounds; streaming as a
 * multiple of memcpy by where the targets lie:
 *
 *     piece     over 1 GiB   one batch, used again   one piece, used again
 *      16 KiB      1.48              0.93                    0.73
 *      32 KiB      1.61              1.19                    0.73
 *      64 KiB      1.53              1.28                    0.94
 *     256 KiB      1.49              1.36                    0.98
 *       2 MiB      1.54              1.48                    1.25
 *
 * From 64 KiB on it is a gain or a draw, whatever the target, as long as the
 * source comes from memory. The one loss is a small source and target that both
 * stay in L2, at 0.5: not what a cache of gigabytes serves. */
#define STREAMING_THRESHOLD_BYTES 65536

/* The pieces of a call, in block order. */
struct pieces {
    const uint64_t *targets; /* NULL when the call only sums. */
    const uint64_t *sources; /* NULL when the sources come from rows. */
    const uint64_t *lengths;
    const uint32_t *counts; /* pieces of each block; NULL: one each. */
    size_t piece_count;
    size_t block_count;
};

/* Pieces of one block. */
size_t block_pieces(const struct pieces *pieces, size_t block);

/* Copies one piece, summing the bytes when `state` is given. */
void copy_piece(uint32_t *state, uint64_t target, uint64_t source,
                uint64_t bytes, uint64_t streaming_threshold_bytes);

/* Takes lengths and piece counts and checks that they agree; fills `pieces`. */
int take_lengths(PyObject *lengths, PyObject *counts, struct array *arrays,
                 struct pieces *pieces);

/* The argument, or the measured constant when left out (NULL). */
int take_threshold(PyObject *object, uint64_t *threshold_bytes);

PyObject *call_crc32c(PyObject *module, PyObject *const *args,
                      Py_ssize_t count, PyObject *keyword_names);
PyObject *call_copy_blocks(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names);
PyObject *call_checksum_blocks(PyObject *module, PyObject *const *args,
                               Py_ssize_t count, PyObject *keyword_names);
PyObject *call_buffer_address(PyObject *module, PyObject *const *args,
                              Py_ssize_t count, PyObject *keyword_names);

#endif
