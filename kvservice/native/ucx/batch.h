/*
 * A batch of one-sided operations: posted, made progress on and ended in one call.
 *
 * Order of events: every operation's remote range is compared with its segment; the
 * endpoints are wired up; operations are posted, at most `window` at a time; the call
 * returns when none of them can touch local memory any more. A put counts as done
 * when its endpoint was flushed, that is, when its bytes are in the peer's memory.
 */
#ifndef KVSERVICE_UCX_BATCH_H
#define KVSERVICE_UCX_BATCH_H

#include <stddef.h>
#include <stdint.h>

#include "endpoint.h"

#define WINDOW_MAX 4096u

/* Statuses of operations beside UCX's own, which are from -127 to 0. */
#define STATUS_OUTSIDE (-1001)     /* not within its segment; never posted */
#define STATUS_NOT_POSTED (-1002)  /* the batch stopped before it */
#define STATUS_UNSETTLED (-1003)   /* may still touch local memory */
#define STATUS_UNCONFIRMED (-1004) /* a put that left, and may or may not arrive */

/* Why a batch ended, in the order in which one hides another. */
enum outcome {
    OUTCOME_DONE,     /* each operation has status 0 */
    OUTCOME_FAILED,   /* an operation failed, or was outside its segment */
    OUTCOME_DEADLINE, /* the deadline passed first */
    OUTCOME_LOST,     /* an endpoint failed, the watched one perhaps */
    OUTCOME_CLOSED,   /* the endpoint or the worker was closed meanwhile */
    /* Operations are still under way and cannot be ended: the worker is poisoned. */
    OUTCOME_UNSETTLED,
    OUTCOME_NO_MEMORY,
};

/* What the caller asks for; all of it borrowed until batch_run returns. */
struct transfer {
    int is_put;
    struct segment **segments;
    size_t segments_count;
    const uint32_t *segment_indexes;
    const uint64_t *local, *remote, *lengths;
    int32_t *statuses;
    size_t count;
    uint32_t window;
    int64_t deadline_ns;
    int64_t grace_ns; /* past the deadline, for operations that cannot be cut off */
    struct endpoint *watched;             /* may be NULL */
    struct registration *local_memory;    /* may be NULL: UCX looks it up itself */
};

/* With the worker's lock, which it lets go of in between. Every segment is open, and
 * every segment index below `segments_count`. */
enum outcome batch_run(struct worker *worker, const struct transfer *transfer);

/* Frees what abandoned batches left, after UCX's worker has gone. */
void batches_forget(struct worker *worker);

#endif
