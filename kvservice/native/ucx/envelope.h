/*
 * The envelope around what UCX packs, an address or a remote key. UCX reads such
 * bytes without doubting them: random ones crash the process. The envelope is
 * looked at first, so that what is damaged, cut short or something else never
 * gets there. It guards against accidents; a peer that forges one is trusted.
 *
 *     0  "KVUX"
 *     4  u8   version of this layout, 1
 *     5  u8   kind: 1 address, 2 remote key
 *     6  u8   major and
 *     7  u8     minor version of the UCX that packed the body
 *     8  u32  bytes of the body
 *    12  u32  CRC-32C of bytes 0 to 11 and of the body
 *    16       body
 *
 * Little endian. The body of a remote key starts with the registration that it
 * opens: u64 address, u64 length; then UCX's bytes. That of an address is UCX's.
 */
#ifndef KVSERVICE_UCX_ENVELOPE_H
#define KVSERVICE_UCX_ENVELOPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#define ENVELOPE_BODY_BYTES_MAX 65536u

#define ENVELOPE_WORDS_BYTES 96

enum envelope_kind { ENVELOPE_ADDRESS = 1, ENVELOPE_RKEY = 2 };

/* A bytes object; `prefix` may be empty. */
PyObject *seal_envelope(enum envelope_kind kind, const void *prefix,
                        size_t prefix_bytes, const void *content,
                        size_t content_bytes);

/* Words on the UCX that packed it, where that is another than this process's; else
 * "". For messages: two versions may or may not understand each other. */
const char *packed_elsewhere(PyObject *object, char text[ENVELOPE_WORDS_BYTES]);

/* The body, inside `object`, which must stay alive; NULL with MalformedError. */
const uint8_t *open_envelope(PyObject *object, enum envelope_kind kind,
                             size_t *body_bytes);

#endif
