#include "envelope.h"

#include <stdio.h>
#include <string.h>

#include "failures.h"
#include "library.h"

#define HEADER_BYTES 16u
#define SUMMED_HEADER_BYTES 12u
#define LAYOUT_VERSION 1

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "envelopes are little endian; the extension is optional"
#endif

/* Bit by bit: a few hundred bytes for each connection do not pay for a table. */
static uint32_t sum_bytes(uint32_t state, const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        state ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            state = (state >> 1) ^ ((state & 1) ? 0x82F63B78u : 0);
        }
    }
    return state;
}

static uint32_t sum_envelope(const uint8_t *bytes, size_t body_bytes)
{
    uint32_t state = sum_bytes(~0u, bytes, SUMMED_HEADER_BYTES);
    return ~sum_bytes(state, bytes + HEADER_BYTES, body_bytes);
}

PyObject *seal_envelope(enum envelope_kind kind, const void *prefix,
                        size_t prefix_bytes, const void *content,
                        size_t content_bytes)
{
    uint32_t body_bytes = (uint32_t)(prefix_bytes + content_bytes);
    PyObject *object =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER_BYTES + body_bytes));
    if (object == NULL) {
        return NULL;
    }
    uint8_t *bytes = (uint8_t *)PyBytes_AS_STRING(object);
    memcpy(bytes, "KVUX", 4);
    bytes[4] = LAYOUT_VERSION;
    bytes[5] = (uint8_t)kind;
    bytes[6] = (uint8_t)ucx.major;
    bytes[7] = (uint8_t)ucx.minor;
    memcpy(bytes + 8, &body_bytes, 4);
    memcpy(bytes + HEADER_BYTES, prefix, prefix_bytes);
    memcpy(bytes + HEADER_BYTES + prefix_bytes, content, content_bytes);
    uint32_t sum = sum_envelope(bytes, body_bytes);
    memcpy(bytes + SUMMED_HEADER_BYTES, &sum, 4);
    return object;
}

static const char *find_fault(const uint8_t *bytes, size_t count,
                              enum envelope_kind kind)
{
    uint32_t body_bytes, sum;
    if (count < HEADER_BYTES || memcmp(bytes, "KVUX", 4) != 0) {
        return "is not one of ours";
    }
    if (bytes[4] != LAYOUT_VERSION) {
        return "has a layout of another version";
    }
    memcpy(&body_bytes, bytes + 8, 4);
    memcpy(&sum, bytes + SUMMED_HEADER_BYTES, 4);
    if (body_bytes == 0 || body_bytes > ENVELOPE_BODY_BYTES_MAX ||
        count - HEADER_BYTES != body_bytes) {
        return "is cut short, or has bytes too many";
    }
    if (sum != sum_envelope(bytes, body_bytes)) {
        return "is damaged: its checksum is another";
    }
    return bytes[5] == kind ? NULL : "is of the other kind";
}

const uint8_t *open_envelope(PyObject *object, enum envelope_kind kind,
                             size_t *body_bytes)
{
    const char *name =
        kind == ENVELOPE_ADDRESS ? "the peer's address" : "the remote key";
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be bytes, not %s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(object);
    size_t count = (size_t)PyBytes_GET_SIZE(object);
    const char *fault = find_fault(bytes, count, kind);
    if (fault != NULL) {
        PyErr_Format(malformed_error, "%s %s (%zu bytes)", name, fault, count);
        return NULL;
    }
    *body_bytes = count - HEADER_BYTES;
    return bytes + HEADER_BYTES;
}

const char *packed_elsewhere(PyObject *object, char text[ENVELOPE_WORDS_BYTES])
{
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(object);
    text[0] = '\0';
    if (bytes[6] != ucx.major || bytes[7] != ucx.minor) {
        snprintf(text, ENVELOPE_WORDS_BYTES, " (the peer has UCX %u.%u, this is %u.%u)",
                 bytes[6], bytes[7], ucx.major, ucx.minor);
    }
    return text;
}
