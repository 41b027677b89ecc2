#include "batch_state.h"

#include <stdlib.h>

/* Posts, and bytes posted, between two looks at the clock, at UCX and at the queue
 * for the lock, where operations end as they are posted. */
#define POSTS_UNLOOKED 32u
#define BYTES_UNLOOKED (1u << 20)

static enum outcome endpoint_cause(const struct endpoint *endpoint)
{
    if (endpoint->is_closing) {
        return OUTCOME_CLOSED;
    }
    return endpoint_is_halted(endpoint) ? OUTCOME_LOST : OUTCOME_DONE;
}

/* Remembers the first reason to post no more; all but the clock. */
static int has_cause(struct batch *batch)
{
    const struct endpoint *watched = batch->transfer->watched;
    if (batch->cause != OUTCOME_DONE) {
        return 1;
    }
    if (batch->worker->state != WORKER_OPEN) {
        batch->cause = OUTCOME_CLOSED;
    } else if (watched != NULL) {
        batch->cause = endpoint_cause(watched);
    }
    for (uint32_t i = 0; i < batch->lanes_count && batch->cause == OUTCOME_DONE; i++) {
        batch->cause = endpoint_cause(batch->lanes[i].endpoint);
    }
    if (batch->cause == OUTCOME_DONE && batch->has_failed) {
        batch->cause = OUTCOME_FAILED;
    }
    return batch->cause != OUTCOME_DONE;
}

static int must_stop(struct batch *batch)
{
    if (!has_cause(batch) && monotonic_ns() >= batch->transfer->deadline_ns) {
        batch->cause = OUTCOME_DEADLINE;
    }
    return batch->cause != OUTCOME_DONE;
}

static void wait_round(struct batch *batch, int64_t until_ns)
{
    worker_round(batch->worker, &batch->idle_since_ns, &batch->is_asleep, until_ns);
}

/* Returns how many operations are to be posted. */
static size_t check_ranges(const struct transfer *transfer)
{
    size_t postable_count = 0;
    for (size_t i = 0; i < transfer->count; i++) {
        const struct segment *segment =
            transfer->segments[transfer->segment_indexes[i]];
        uint64_t offset = transfer->remote[i] - segment->base;
        uint64_t length = transfer->lengths[i];
        /* An address below the base wraps to an offset that is too large; and two
         * comparisons, since the sum of a wrong offset and length may wrap too. */
        if (length > segment->length_bytes ||
            offset > segment->length_bytes - length) {
            transfer->statuses[i] = STATUS_OUTSIDE;
        } else if (length == 0) {
            transfer->statuses[i] = UCS_OK;
        } else {
            transfer->statuses[i] = STATUS_NOT_POSTED;
            postable_count++;
        }
    }
    return postable_count;
}

static int wire_lanes(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        endpoint_start_wiring(batch->lanes[i].endpoint);
    }
    for (uint32_t i = 0; i < batch->lanes_count;) {
        endpoint_start_wiring(batch->lanes[i].endpoint); /* If memory was short. */
        if (endpoint_is_wired(batch->lanes[i].endpoint)) {
            i++;
        } else if (must_stop(batch)) {
            return 0;
        } else {
            wait_round(batch, batch->transfer->deadline_ns);
        }
    }
    return 1;
}

static void post(struct batch *batch, uint32_t index)
{
    const struct transfer *transfer = batch->transfer;
    uint32_t number = transfer->segment_indexes[index];
    struct lane *lane = &batch->lanes[batch->segment_lanes[number]];
    struct slot *slot = &batch->slots[batch->free_slot];
    void *local = (void *)(uintptr_t)transfer->local[index];
    ucp_rkey_h rkey = transfer->segments[number]->rkey;
    ucp_ep_h handle = lane->endpoint->handle;
    batch->parameters.user_data = slot;
    ucs_status_ptr_t answer =
        transfer->is_put
            ? ucx.ucp_put_nbx(handle, local, transfer->lengths[index],
                              transfer->remote[index], rkey, &batch->parameters)
            : ucx.ucp_get_nbx(handle, local, transfer->lengths[index],
                              transfer->remote[index], rkey, &batch->parameters);
    lane->has_posted = 1;
    if (UCS_PTR_IS_PTR(answer)) {
        transfer->statuses[index] = UCS_INPROGRESS;
        slot->index = index;
        slot->lane = lane;
        batch->free_slot = slot->next_free;
        batch->outstanding_count++;
        lane->outstanding_count++;
    } else {
        transfer->statuses[index] = UCS_PTR_RAW_STATUS(answer);
        batch->has_failed |= answer != NULL;
    }
}

static void post_operations(struct batch *batch)
{
    const struct transfer *transfer = batch->transfer;
    for (uint32_t i = 0; i < transfer->count; i++) {
        if (transfer->statuses[i] != STATUS_NOT_POSTED) {
            continue;
        }
        while (batch->free_slot == NO_SLOT) {
            wait_round(batch, transfer->deadline_ns);
            if (must_stop(batch)) {
                return;
            }
        }
        batch->posted_bytes += transfer->lengths[i];
        if (++batch->posts_count % POSTS_UNLOOKED == 0 ||
            batch->posted_bytes >= BYTES_UNLOOKED) {
            batch->posted_bytes = 0;
            worker_progress(batch->worker);
            worker_yield(batch->worker);
            if (must_stop(batch)) {
                return;
            }
        }
        if (has_cause(batch)) {
            return;
        }
        post(batch, i);
    }
}

/* The operations of watched endpoints end with the endpoint, and nothing else ends
 * them where the peer is silent; the others get their grace. */
static void cut_off_lanes(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        struct lane *lane = &batch->lanes[i];
        if (lane->endpoint->is_watched &&
            (lane->outstanding_count != 0 ||
             (lane->flush != NULL && !lane->flush->is_done))) {
            endpoint_cut_off(lane->endpoint);
        }
    }
}

static int is_flushing(const struct batch *batch)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        const struct tracker *flush = batch->lanes[i].flush;
        if (flush != NULL && !flush->is_done) {
            return 1;
        }
    }
    return 0;
}

/* Waits for what is under way; whether all of it has ended. */
static int drain(struct batch *batch)
{
    int64_t until_ns = batch->transfer->deadline_ns;
    int is_cut_off = 0;
    while (batch->outstanding_count != 0 || is_flushing(batch)) {
        /* A batch whose peer is lost, or that is told to stop, need not wait for its
         * deadline; one with a failed operation lets the others end. */
        int is_late = must_stop(batch) && (batch->cause != OUTCOME_FAILED ||
                                           monotonic_ns() >= until_ns);
        if (is_late && !is_cut_off) {
            cut_off_lanes(batch);
            is_cut_off = 1;
            until_ns = monotonic_ns() + batch->transfer->grace_ns;
        } else if (is_cut_off && monotonic_ns() >= until_ns) {
            return 0;
        }
        wait_round(batch, until_ns);
    }
    return 1;
}

static void start_flushes(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        struct lane *lane = &batch->lanes[i];
        ucp_request_param_t parameters = {0};
        if (!lane->has_posted || lane->endpoint->handle == NULL) {
            continue;
        }
        lane->flush = tracker_new(batch->worker, &parameters);
        if (lane->flush != NULL) {
            tracker_started(lane->flush, ucx.ucp_ep_flush_nbx(lane->endpoint->handle,
                                                              &parameters));
        }
    }
}

static void end_flushes(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        struct lane *lane = &batch->lanes[i];
        lane->flushed = STATUS_UNCONFIRMED;
        if (lane->flush != NULL) {
            if (lane->flush->is_done) {
                lane->flushed = lane->flush->status;
            }
            tracker_drop(lane->flush);
            lane->flush = NULL;
        }
    }
}

/* Statuses after the last event: of puts whose flush failed, and of what is left. */
static enum outcome settle(struct batch *batch)
{
    const struct transfer *transfer = batch->transfer;
    int is_done = 1;
    for (size_t i = 0; i < transfer->count; i++) {
        int32_t *status = &transfer->statuses[i];
        const struct lane *lane =
            &batch->lanes[batch->segment_lanes[transfer->segment_indexes[i]]];
        if (*status == UCS_INPROGRESS) {
            *status = STATUS_UNSETTLED;
        } else if (*status == UCS_OK && transfer->is_put &&
                   transfer->lengths[i] != 0) {
            *status = lane->flushed;
        } else if (*status == STATUS_NOT_POSTED &&
                   lane->endpoint->failure != UCS_OK) {
            *status = lane->endpoint->failure;
        }
        is_done &= *status == UCS_OK;
    }
    if (is_done) {
        return OUTCOME_DONE;
    }
    return batch->cause != OUTCOME_DONE ? batch->cause : OUTCOME_FAILED;
}

static void run_phases(struct batch *batch, size_t postable_count)
{
    if (postable_count == 0 || must_stop(batch) || !wire_lanes(batch)) {
        return;
    }
    post_operations(batch);
    if (drain(batch) && batch->transfer->is_put) {
        start_flushes(batch);
        drain(batch);
    }
}

enum outcome batch_run(struct worker *worker, const struct transfer *transfer)
{
    struct batch *batch = batch_new(worker, transfer);
    if (batch == NULL) {
        return OUTCOME_NO_MEMORY;
    }
    size_t postable_count = check_ranges(transfer);
    batch_begin_uses(batch);
    run_phases(batch, postable_count);
    end_flushes(batch);
    enum outcome outcome = settle(batch);
    batch_end_uses(batch, transfer);
    if (batch->outstanding_count == 0) {
        free(batch);
        return outcome;
    }
    batch_abandon(batch);
    return OUTCOME_UNSETTLED;
}
