#include "endpoint.h"

static void endpoint_failed(void *argument, ucp_ep_h handle, ucs_status_t status)
{
    struct endpoint *endpoint = argument;
    (void)handle;
    if (endpoint->failure == UCS_OK) {
        endpoint->failure = status;
    }
    endpoint->worker->has_ended = 1;
}

ucs_status_t endpoint_open(struct endpoint *endpoint, struct worker *worker,
                           const void *address)
{
    const ucp_ep_params_t parameters = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = endpoint->is_watched ? UCP_ERR_HANDLING_MODE_PEER
                                         : UCP_ERR_HANDLING_MODE_NONE,
        .err_handler = {.cb = endpoint_failed, .arg = endpoint},
    };
    endpoint->worker = worker;
    ucs_status_t status =
        ucx.ucp_ep_create(worker->handle, &parameters, &endpoint->handle);
    if (status == UCS_OK) {
        LIST_ADD(worker->endpoints, endpoint);
    } else {
        endpoint->worker = NULL;
    }
    return status;
}

void endpoint_start_wiring(struct endpoint *endpoint)
{
    ucp_request_param_t parameters = {0};
    if (endpoint->is_wired || endpoint->wiring != NULL ||
        endpoint_is_halted(endpoint)) {
        return;
    }
    endpoint->wiring = tracker_new(endpoint->worker, &parameters);
    if (endpoint->wiring != NULL) {
        tracker_started(endpoint->wiring,
                        ucx.ucp_ep_flush_nbx(endpoint->handle, &parameters));
    }
}

int endpoint_is_wired(struct endpoint *endpoint)
{
    struct tracker *wiring = endpoint->wiring;
    if (wiring != NULL && wiring->is_done) {
        if (wiring->status == UCS_OK) {
            endpoint->is_wired = 1;
        } else if (endpoint->failure == UCS_OK) {
            endpoint->failure = wiring->status;
        }
        tracker_drop(wiring);
        endpoint->wiring = NULL;
    }
    return endpoint->is_wired;
}

void endpoint_end_use(struct endpoint *endpoint)
{
    endpoint->uses_count--;
    if (endpoint->is_closing) {
        pthread_cond_broadcast(&endpoint->worker->changed);
    }
}

int endpoint_wire(struct endpoint *endpoint, int64_t deadline_ns)
{
    struct worker *worker = endpoint->worker;
    int64_t idle_since_ns = 0;
    int is_asleep;
    worker_begin(worker);
    endpoint->uses_count++;
    endpoint_start_wiring(endpoint);
    while (!endpoint_is_wired(endpoint) && endpoint->wiring != NULL &&
           !endpoint_is_halted(endpoint) && worker->state == WORKER_OPEN &&
           monotonic_ns() < deadline_ns) {
        worker_round(worker, &idle_since_ns, &is_asleep, deadline_ns);
    }
    int is_wired = endpoint_is_wired(endpoint);
    endpoint_end_use(endpoint);
    worker_end(worker);
    return is_wired;
}

void endpoint_cut_off(struct endpoint *endpoint)
{
    const ucp_request_param_t parameters = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    endpoint->is_cut_off = 1;
    if (endpoint->handle == NULL) {
        return;
    }
    ucs_status_ptr_t answer =
        ucx.ucp_ep_close_nbx(endpoint->handle, &parameters);
    endpoint->handle = NULL;
    if (UCS_PTR_IS_PTR(answer)) {
        ucx.ucp_request_free(answer); /* Its end is of no interest. */
    }
    worker_wake_all(endpoint->worker);
}

/* Closes in UCX's own way, which sends what is still to be sent. Once asked, UCX
 * calls back for the endpoint no more, whether or not it comes to an end. */
static void close_in_order(struct endpoint *endpoint, int64_t until_ns)
{
    struct worker *worker = endpoint->worker;
    ucp_request_param_t parameters = {0};
    int64_t idle_since_ns = 0;
    int is_asleep;
    struct tracker *closing = tracker_new(worker, &parameters);
    ucs_status_ptr_t answer = ucx.ucp_ep_close_nbx(endpoint->handle, &parameters);
    endpoint->handle = NULL;
    if (closing == NULL) {
        if (UCS_PTR_IS_PTR(answer)) {
            ucx.ucp_request_free(answer);
        }
        return;
    }
    tracker_started(closing, answer);
    while (!closing->is_done && monotonic_ns() < until_ns) {
        worker_round(worker, &idle_since_ns, &is_asleep, until_ns);
    }
    tracker_drop(closing);
}

void endpoint_close(struct endpoint *endpoint, int64_t until_ns)
{
    struct worker *worker = endpoint->worker;
    if (worker == NULL || endpoint->is_closing) {
        return; /* It is, or another thread is at it. */
    }
    endpoint->is_closing = 1;
    worker_wake_all(worker);
    while (endpoint->uses_count != 0) {
        pthread_cond_wait(&worker->changed, &worker->lock);
    }
    if (endpoint->wiring != NULL) {
        tracker_drop(endpoint->wiring);
        endpoint->wiring = NULL;
    }
    while (endpoint->segments != NULL) {
        segment_release(endpoint->segments);
    }
    if (endpoint->is_watched) {
        endpoint_cut_off(endpoint);
    } else if (endpoint->handle != NULL) {
        close_in_order(endpoint, until_ns);
    }
    LIST_REMOVE(worker->endpoints, endpoint);
    endpoint->worker = NULL;
}
