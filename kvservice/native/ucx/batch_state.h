/* What a batch is made of, for the files that make it up: batch_state.c has its life
 * from malloc to free, batch.c what happens in between. */
#ifndef KVSERVICE_UCX_BATCH_STATE_H
#define KVSERVICE_UCX_BATCH_STATE_H

#include "batch.h"

#define NO_SLOT UINT32_MAX

/* One endpoint of a batch. */
struct lane {
    struct endpoint *endpoint;
    uint32_t outstanding_count;
    int has_posted;
    int flushed; /* of puts: UCX's status, or STATUS_UNCONFIRMED */
    struct tracker *flush;
};

/* One operation that UCX has not ended yet. */
struct slot {
    struct batch *batch;
    struct lane *lane;
    uint32_t index;
    uint32_t next_free;
};

struct batch {
    struct worker *worker;
    const struct transfer *transfer; /* NULL once abandoned */
    struct batch *next_abandoned;
    struct lane *lanes;
    uint32_t lanes_count;
    uint32_t *segment_lanes; /* the lane of each segment */
    struct slot *slots;
    uint32_t free_slot;
    uint32_t outstanding_count;
    uint32_t posts_count;
    uint64_t posted_bytes;
    int has_failed;
    int is_asleep;
    enum outcome cause;
    int64_t idle_since_ns;
    ucp_request_param_t parameters;
};

/* One block of memory for the batch and all that it needs; NULL without memory. */
struct batch *batch_new(struct worker *worker, const struct transfer *transfer);

/* Between these two, nothing that the batch names can be closed. What an operation that
 * never ends may still read is kept until the worker goes. */
void batch_begin_uses(struct batch *batch);
void batch_end_uses(struct batch *batch, const struct transfer *transfer);

/* Leaves a batch with operations under way to the worker; it writes no more statuses. */
void batch_abandon(struct batch *batch);

#endif
