/* Remote segments and registrations of local memory: see endpoint.h. */
#include "endpoint.h"

ucs_status_t segment_attach(struct segment *segment, struct endpoint *endpoint,
                            const void *rkey)
{
    ucs_status_t status =
        ucx.ucp_ep_rkey_unpack(endpoint->handle, rkey, &segment->rkey);
    if (status == UCS_OK) {
        segment->endpoint = endpoint;
        LIST_ADD(endpoint->segments, segment);
    }
    return status;
}

void segment_release(struct segment *segment)
{
    if (segment->endpoint == NULL) {
        return;
    }
    LIST_REMOVE(segment->endpoint->segments, segment);
    segment->endpoint = NULL;
    if (segment->uses_count == 0) {
        ucx.ucp_rkey_destroy(segment->rkey);
    }
}

void segment_close(struct segment *segment)
{
    segment->is_closing = 1;
    if (segment->uses_count == 0) {
        segment_release(segment);
    }
}

void segment_end_use(struct segment *segment)
{
    segment->uses_count--;
    if (segment->is_closing) {
        segment_close(segment);
    }
}

/* UCX registers memory of any kind, and fails only when it is reached for. */
static int has_memory_type(const struct worker *worker, ucs_memory_type_t type)
{
    ucp_context_attr_t attributes = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    return ucx.ucp_context_query(worker->context, &attributes) == UCS_OK &&
           (attributes.memory_types & UCS_BIT(type)) != 0;
}

ucs_status_t registration_open(struct registration *registration,
                               struct worker *worker)
{
    if (!has_memory_type(worker, registration->memory_type)) {
        return UCS_ERR_UNSUPPORTED;
    }
    const ucp_mem_map_params_t parameters = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS |
                      UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = (void *)(uintptr_t)registration->base,
        .length = registration->length_bytes,
        .memory_type = registration->memory_type,
    };
    ucs_status_t status =
        ucx.ucp_mem_map(worker->context, &parameters, &registration->handle);
    if (status == UCS_OK) {
        registration->worker = worker;
        LIST_ADD(worker->registrations, registration);
    }
    return status;
}

static void registration_release(struct registration *registration)
{
    struct worker *worker = registration->worker;
    if (worker != NULL) {
        LIST_REMOVE(worker->registrations, registration);
        registration->worker = NULL;
        ucx.ucp_mem_unmap(worker->context, registration->handle);
    }
}

void registration_close(struct registration *registration)
{
    registration->is_closing = 1;
    if (registration->uses_count == 0) {
        registration_release(registration);
    }
}

void registration_end_use(struct registration *registration)
{
    registration->uses_count--;
    if (registration->is_closing) {
        registration_close(registration);
    }
}

void registrations_release(struct worker *worker)
{
    while (worker->registrations != NULL) {
        registration_release(worker->registrations);
    }
}
