#include "batch_state.h"

#include <stdlib.h>

static void operation_ended(void *request, ucs_status_t status, void *user_data)
{
    struct slot *slot = user_data;
    struct batch *batch = slot->batch;
    ucx.ucp_request_free(request);
    batch->outstanding_count--;
    slot->lane->outstanding_count--;
    if (batch->transfer == NULL) {
        return; /* Abandoned: freed with the worker. */
    }
    batch->transfer->statuses[slot->index] = status;
    slot->next_free = batch->free_slot;
    batch->free_slot = (uint32_t)(slot - batch->slots);
    batch->has_failed |= status != UCS_OK;
    batch->worker->has_ended |= batch->is_asleep;
}

struct batch *batch_new(struct worker *worker, const struct transfer *transfer)
{
    uint32_t slots_count =
        transfer->count < transfer->window ? (uint32_t)transfer->count : transfer->window;
    size_t bytes = sizeof(struct batch) +
                   transfer->segments_count * sizeof(struct lane) +
                   slots_count * sizeof(struct slot) +
                   transfer->segments_count * sizeof(uint32_t);
    struct batch *batch = malloc(bytes);
    if (batch == NULL) {
        return NULL;
    }
    *batch = (struct batch){.worker = worker, .transfer = transfer};
    batch->lanes = (struct lane *)(batch + 1);
    batch->slots = (struct slot *)(batch->lanes + transfer->segments_count);
    batch->segment_lanes = (uint32_t *)(batch->slots + slots_count);
    for (uint32_t i = 0; i < slots_count; i++) {
        batch->slots[i].batch = batch;
        batch->slots[i].next_free = i + 1 < slots_count ? i + 1 : NO_SLOT;
    }
    batch->free_slot = slots_count != 0 ? 0 : NO_SLOT;
    batch->parameters.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    batch->parameters.cb.send = operation_ended;
    if (transfer->local_memory != NULL) {
        batch->parameters.op_attr_mask |=
            UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        batch->parameters.memh = transfer->local_memory->handle;
        batch->parameters.memory_type = transfer->local_memory->memory_type;
    }
    return batch;
}

/* A lane for each endpoint, found by the mark that the batch leaves on it. */
void batch_begin_uses(struct batch *batch)
{
    const struct transfer *transfer = batch->transfer;
    uint64_t serial = ++batch->worker->batch_serial;
    for (size_t i = 0; i < transfer->segments_count; i++) {
        struct endpoint *endpoint = transfer->segments[i]->endpoint;
        if (endpoint->batch_serial != serial) {
            endpoint->batch_serial = serial;
            endpoint->batch_lane = batch->lanes_count++;
            endpoint->uses_count++;
            batch->lanes[endpoint->batch_lane] = (struct lane){.endpoint = endpoint};
        }
        transfer->segments[i]->uses_count++;
        batch->segment_lanes[i] = endpoint->batch_lane;
    }
    if (transfer->watched != NULL) {
        transfer->watched->uses_count++;
    }
    if (transfer->local_memory != NULL) {
        transfer->local_memory->uses_count++;
    }
    worker_begin(batch->worker);
}

void batch_end_uses(struct batch *batch, const struct transfer *transfer)
{
    for (uint32_t i = 0; i < batch->lanes_count; i++) {
        endpoint_end_use(batch->lanes[i].endpoint);
    }
    if (transfer->watched != NULL) {
        endpoint_end_use(transfer->watched);
    }
    if (batch->outstanding_count == 0) {
        for (size_t i = 0; i < transfer->segments_count; i++) {
            segment_end_use(transfer->segments[i]);
        }
        if (transfer->local_memory != NULL) {
            registration_end_use(transfer->local_memory);
        }
    }
    worker_end(batch->worker);
}

void batch_abandon(struct batch *batch)
{
    struct worker *worker = batch->worker;
    batch->transfer = NULL;
    batch->next_abandoned = worker->abandoned;
    worker->abandoned = batch;
    worker->is_poisoned = 1;
}

void batches_forget(struct worker *worker)
{
    while (worker->abandoned != NULL) {
        struct batch *batch = worker->abandoned;
        worker->abandoned = batch->next_abandoned;
        free(batch);
    }
}
