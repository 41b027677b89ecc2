/* Opening and closing a worker, and the requests that outlive their caller. */
#include "worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "batch.h"
#include "endpoint.h"

static ucs_status_t open_context(struct worker *worker,
                                 const struct setting *settings, size_t count,
                                 char *failed, size_t failed_bytes)
{
    ucp_config_t *config;
    snprintf(failed, failed_bytes, "cannot read UCX's configuration");
    ucs_status_t status = ucx.ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) {
        return status;
    }
    for (size_t i = 0; i < count && status == UCS_OK; i++) {
        snprintf(failed, failed_bytes, "UCX refuses the setting %.64s=%.128s",
                 settings[i].name, settings[i].value);
        status = ucx.ucp_config_modify(config, settings[i].name, settings[i].value);
    }
    if (status == UCS_OK) {
        const ucp_params_t parameters = {
            .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
            .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP,
            .mt_workers_shared = 1, /* by two, each with its lock */
        };
        snprintf(failed, failed_bytes, "cannot open UCX with these settings");
        status = ucx.ucp_init_version(API_MAJOR, API_MINOR, &parameters, config,
                                      &worker->context);
    }
    ucx.ucp_config_release(config);
    return status;
}

static ucs_status_t open_half(struct worker *worker, ucp_worker_h *handle,
                              int *event_fd, char *failed, size_t failed_bytes)
{
    const ucp_worker_params_t parameters = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    snprintf(failed, failed_bytes, "cannot make a UCX worker");
    ucs_status_t status =
        ucx.ucp_worker_create(worker->context, &parameters, handle);
    if (status == UCS_OK) {
        status = ucx.ucp_worker_get_efd(*handle, event_fd);
    }
    return status;
}

static int open_lock(struct worker *worker)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) {
        return -1;
    }
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int is_made = pthread_cond_init(&worker->changed, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&worker->served_lock, NULL);
    pthread_mutex_init(&worker->next, NULL);
    pthread_mutex_init(&worker->lock, NULL);
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    worker->serve_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return is_made && worker->wake_fd >= 0 && worker->serve_fd >= 0 ? 0 : -1;
}

static void release_all(struct worker *worker)
{
    if (worker->handle != NULL) {
        ucx.ucp_worker_destroy(worker->handle);
        worker->handle = NULL;
    }
    if (worker->served != NULL) {
        ucx.ucp_worker_destroy(worker->served);
        worker->served = NULL;
    }
    /* After the workers: an operation that never ended may need its memory handle. */
    registrations_release(worker);
    if (worker->context != NULL) {
        ucx.ucp_cleanup(worker->context);
        worker->context = NULL;
    }
    batches_forget(worker);
    while (worker->orphans != NULL) {
        struct tracker *orphan = worker->orphans;
        worker->orphans = orphan->next_orphan;
        free(orphan);
    }
    if (worker->wake_fd >= 0) {
        close(worker->wake_fd);
    }
    if (worker->serve_fd >= 0) {
        close(worker->serve_fd);
    }
}

ucs_status_t worker_open(struct worker *worker, const struct setting *settings,
                         size_t count, char *failed, size_t failed_bytes)
{
    sigset_t all, before;
    worker->fork_generation = ucx.fork_generation;
    worker->state = WORKER_CLOSED;
    if (open_lock(worker) < 0) {
        snprintf(failed, failed_bytes, "no descriptors or memory for a worker");
        release_all(worker);
        return UCS_ERR_NO_RESOURCE;
    }
    /* UCX starts a thread of its own: no signal of the process may go to it. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ucs_status_t status =
        open_context(worker, settings, count, failed, failed_bytes);
    if (status == UCS_OK) {
        status = open_half(worker, &worker->handle, &worker->event_fd, failed,
                           failed_bytes);
    }
    if (status == UCS_OK) {
        status = open_half(worker, &worker->served, &worker->served_event_fd, failed,
                           failed_bytes);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != UCS_OK) {
        release_all(worker);
        return status;
    }
    worker->state = WORKER_OPEN;
    return UCS_OK;
}

void worker_close(struct worker *worker)
{
    if (worker->fork_generation != ucx.fork_generation) {
        return; /* The parent's: its descriptors and peers are not ours to end. */
    }
    worker_lock(worker);
    if (worker->state == WORKER_OPEN) {
        worker->state = WORKER_CLOSING;
        worker_wake_all(worker);
        while (worker->uses_count != 0) {
            pthread_cond_wait(&worker->changed, &worker->lock);
        }
        int64_t until_ns = monotonic_ns() + CLOSE_GRACE_NS;
        while (worker->endpoints != NULL) {
            endpoint_close(worker->endpoints, until_ns);
        }
        release_all(worker);
        worker->state = WORKER_CLOSED;
        pthread_cond_broadcast(&worker->changed);
    }
    while (worker->state == WORKER_CLOSING) {
        pthread_cond_wait(&worker->changed, &worker->lock);
    }
    worker_unlock(worker);
}

int worker_enter_to_free(struct worker *worker)
{
    if (worker->fork_generation != ucx.fork_generation) {
        return 0;
    }
    worker_lock(worker);
    while (worker->state == WORKER_CLOSING) {
        pthread_cond_wait(&worker->changed, &worker->lock);
    }
    if (worker->state == WORKER_CLOSED) {
        worker_unlock(worker);
        return 0;
    }
    return 1;
}

static void request_ended(void *request, ucs_status_t status, void *user_data)
{
    struct tracker *tracker = user_data;
    ucx.ucp_request_free(request);
    tracker->status = status;
    tracker->is_done = 1;
    tracker->worker->has_ended = 1;
    if (tracker->is_orphan) {
        struct tracker **link = &tracker->worker->orphans;
        while (*link != tracker) {
            link = &(*link)->next_orphan;
        }
        *link = tracker->next_orphan;
        free(tracker);
    }
}

struct tracker *tracker_new(struct worker *worker, ucp_request_param_t *parameters)
{
    struct tracker *tracker = calloc(1, sizeof(*tracker));
    if (tracker != NULL) {
        tracker->worker = worker;
        parameters->op_attr_mask |=
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        parameters->cb.send = request_ended;
        parameters->user_data = tracker;
    }
    return tracker;
}

void tracker_started(struct tracker *tracker, ucs_status_ptr_t answer)
{
    tracker->worker->is_touched = 1;
    if (!UCS_PTR_IS_PTR(answer)) {
        tracker->status = UCS_PTR_RAW_STATUS(answer);
        tracker->is_done = 1;
    }
}

void tracker_drop(struct tracker *tracker)
{
    if (tracker->is_done) {
        free(tracker);
        return;
    }
    tracker->is_orphan = 1;
    tracker->next_orphan = tracker->worker->orphans;
    tracker->worker->orphans = tracker;
}
