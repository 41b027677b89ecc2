/*
 * Endpoints, the remote segments attached to them, and registrations of local
 * memory. All functions are called with the worker's lock held.
 *
 * A watched endpoint has UCX's error handling PEER: a lost peer is told through
 * `failure`, and it can be cut off, which ends its operations for good. One that is
 * not watched has NONE: only with that does UCX choose CMA, and its operations end
 * when UCX ends them.
 */
#ifndef KVSERVICE_UCX_ENDPOINT_H
#define KVSERVICE_UCX_ENDPOINT_H

#include "worker.h"

struct segment;

struct endpoint {
    struct worker *worker; /* NULL once closed */
    ucp_ep_h handle;       /* NULL once closed or cut off */
    int is_watched;
    int is_wired;   /* UCX has connected: operations go out at once */
    int is_closing; /* no new operation; those under way stop */
    int is_cut_off;
    ucs_status_t failure; /* the first that UCX told */
    struct tracker *wiring;
    unsigned uses_count; /* calls under way */
    /* Which lane of the batch with this serial number it is; see batch.c. */
    uint64_t batch_serial;
    uint32_t batch_lane;
    struct segment *segments;
    struct endpoint *previous, *next;
};

struct segment {
    struct endpoint *endpoint; /* NULL once closed */
    ucp_rkey_h rkey;
    uint64_t base, length_bytes;
    int is_closing;
    unsigned uses_count;
    struct segment *previous, *next;
};

struct registration {
    struct worker *worker; /* NULL once closed */
    ucp_mem_h handle;
    uint64_t base, length_bytes;
    ucs_memory_type_t memory_type;
    int is_closing;
    unsigned uses_count;
    struct registration *previous, *next;
};

/* Whether nothing more may be posted on it. */
static inline int endpoint_is_halted(const struct endpoint *endpoint)
{
    return endpoint->is_closing || endpoint->is_cut_off ||
           endpoint->failure != UCS_OK;
}

/* `endpoint` is zero except for `is_watched`. */
ucs_status_t endpoint_open(struct endpoint *endpoint, struct worker *worker,
                           const void *address);

/* A use keeps the endpoint from being closed; `uses_count` is raised to begin one. */
void endpoint_end_use(struct endpoint *endpoint);

/* Waits until UCX has connected: a first operation would wait for that too, and may
 * not be one that can be ended, while this touches no memory. Whether it has. */
int endpoint_wire(struct endpoint *endpoint, int64_t deadline_ns);
/* The two halves of it, for a caller with several. */
void endpoint_start_wiring(struct endpoint *endpoint);
int endpoint_is_wired(struct endpoint *endpoint);

/* Ends all operations of a watched endpoint, and the endpoint. Their callbacks come
 * in the rounds of progress that follow. */
void endpoint_cut_off(struct endpoint *endpoint);

/* Stops the transfers that use it, waits for them, and gives it back. An endpoint
 * that is not watched may have to wait for its peer, until `until_ns` at most. */
void endpoint_close(struct endpoint *endpoint, int64_t until_ns);

ucs_status_t segment_attach(struct segment *segment, struct endpoint *endpoint,
                            const void *rkey);
/* Given back at once, or by the last transfer that uses it. */
void segment_close(struct segment *segment);
void segment_end_use(struct segment *segment);
/* Whatever uses it: an operation that never ends keeps UCX's part of it. */
void segment_release(struct segment *segment);

ucs_status_t registration_open(struct registration *registration,
                               struct worker *worker);
void registration_close(struct registration *registration);
void registration_end_use(struct registration *registration);
void registrations_release(struct worker *worker);

#endif
