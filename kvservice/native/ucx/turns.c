/* The lock of a worker, who sleeps on what, and serve: see worker.h. */
#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "worker.h"

/* Rounds of serve for peers between two looks at everything else. */
#define SERVE_ROUNDS 64u

void worker_lock(struct worker *worker)
{
    __atomic_add_fetch(&worker->waiting_count, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&worker->next);
    pthread_mutex_lock(&worker->lock);
    pthread_mutex_unlock(&worker->next);
    __atomic_sub_fetch(&worker->waiting_count, 1, __ATOMIC_RELAXED);
}

void worker_unlock(struct worker *worker)
{
    pthread_mutex_unlock(&worker->lock);
}

void worker_yield(struct worker *worker)
{
    if (__atomic_load_n(&worker->waiting_count, __ATOMIC_RELAXED) != 0) {
        worker_unlock(worker);
        worker_lock(worker);
    }
}

enum refusal worker_enter(struct worker *worker)
{
    /* First: in a forked child the lock may be held by a thread that is not there. */
    if (worker->fork_generation != ucx.fork_generation) {
        return REFUSED_FORKED;
    }
    worker_lock(worker);
    if (worker->state != WORKER_OPEN) {
        worker_unlock(worker);
        return REFUSED_CLOSED;
    }
    return REFUSED_NOT;
}

void worker_leave(struct worker *worker)
{
    worker_unlock(worker);
}

static void signal_descriptor(int descriptor)
{
    uint64_t one = 1;
    /* Fails only where the counter is full, and then the other side wakes anyway. */
    if (write(descriptor, &one, sizeof(one)) < 0) {
        return;
    }
}

static void drain_descriptor(int descriptor)
{
    uint64_t count;
    if (read(descriptor, &count, sizeof(count)) < 0) {
        return; /* Nothing was signalled; the descriptor does not block. */
    }
}

static void wake_sleepers(struct worker *worker)
{
    if (worker->sleepers_count != 0) {
        pthread_cond_broadcast(&worker->changed);
    }
    if (worker->is_polled) {
        signal_descriptor(worker->wake_fd);
    }
}

void worker_wake_all(struct worker *worker)
{
    /* Also those that wait for the end of uses, who are not sleepers. */
    pthread_cond_broadcast(&worker->changed);
    wake_sleepers(worker);
    if (worker->is_served) {
        signal_descriptor(worker->serve_fd);
    }
}

void worker_begin(struct worker *worker)
{
    worker->uses_count++;
    worker->drivers_count++;
}

void worker_end(struct worker *worker)
{
    worker->drivers_count--;
    if (worker->drivers_count == 0 && worker->is_serve_asleep &&
        worker->must_wake_serve) {
        signal_descriptor(worker->serve_fd);
    }
    worker->uses_count--;
    if (worker->state != WORKER_OPEN) {
        pthread_cond_broadcast(&worker->changed);
    }
}

unsigned worker_progress(struct worker *worker)
{
    unsigned moved = ucx.ucp_worker_progress(worker->handle);
    if (worker->has_ended) {
        worker->has_ended = 0;
        wake_sleepers(worker);
    }
    return moved;
}

unsigned served_progress(struct worker *worker)
{
    pthread_mutex_lock(&worker->served_lock);
    unsigned moved = ucx.ucp_worker_progress(worker->served);
    pthread_mutex_unlock(&worker->served_lock);
    return moved;
}

static void poll_events(struct worker *worker, int64_t until_ns)
{
    int64_t left_ns = until_ns - monotonic_ns();
    struct timespec left = {left_ns / 1000000000, left_ns % 1000000000};
    struct pollfd descriptors[2] = {{.fd = worker->event_fd, .events = POLLIN},
                                    {.fd = worker->wake_fd, .events = POLLIN}};
    if (left_ns > 0 && ppoll(descriptors, 2, &left, NULL) > 0 &&
        descriptors[1].revents != 0) {
        drain_descriptor(worker->wake_fd);
    }
}

/* Returns at the latest at `until_ns`; the caller then looks for itself. */
static void sleep_until_changed(struct worker *worker, int64_t until_ns)
{
    if (worker->is_polled) {
        /* Whoever polls must look again at what was posted after it armed. */
        if (worker->is_touched) {
            signal_descriptor(worker->wake_fd);
        }
        struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
        worker->sleepers_count++;
        pthread_cond_timedwait(&worker->changed, &worker->lock, &until);
        worker->sleepers_count--;
        return;
    }
    worker->must_wake_serve = 1;
    if (ucx.ucp_worker_arm(worker->handle) != UCS_OK) {
        return; /* There are events to be seen to. */
    }
    worker->is_touched = 0;
    worker->is_polled = 1;
    worker_unlock(worker);
    poll_events(worker, until_ns);
    worker_lock(worker);
    worker->is_polled = 0;
    wake_sleepers(worker); /* One of them must poll instead. */
}

void worker_round(struct worker *worker, int64_t *idle_since_ns, int *is_asleep,
                  int64_t until_ns)
{
    if (worker_progress(worker) != 0) {
        *idle_since_ns = 0;
        worker_yield(worker);
        return;
    }
    int64_t now_ns = monotonic_ns();
    if (*idle_since_ns == 0) {
        *idle_since_ns = now_ns;
    } else if (now_ns - *idle_since_ns >= SPIN_NS && now_ns < until_ns) {
        *is_asleep = 1;
        sleep_until_changed(worker, until_ns);
        *is_asleep = 0;
    }
    worker_yield(worker);
}

/* Returns whether serve shall go on. */
static int serve_sleep(struct worker *worker, int stop_fd, int timeout_ms,
                       enum served *why)
{
    int has_drivers = worker->drivers_count != 0;
    struct pollfd descriptors[4] = {
        {.fd = stop_fd, .events = POLLIN},
        {.fd = worker->serve_fd, .events = POLLIN},
        {.fd = worker->served_event_fd, .events = POLLIN},
        /* poll passes over a negative descriptor: the calls look after this half. */
        {.fd = has_drivers ? -1 : worker->event_fd, .events = POLLIN}};
    worker->must_wake_serve = has_drivers;
    worker->is_serve_asleep = 1;
    worker_unlock(worker);
    int ready = poll(descriptors, 4, timeout_ms);
    int is_interrupted = ready < 0 && errno == EINTR;
    worker_lock(worker);
    worker->is_serve_asleep = 0;
    if (ready > 0 && descriptors[1].revents != 0) {
        drain_descriptor(worker->serve_fd);
    }
    if (is_interrupted) {
        *why = SERVE_INTERRUPTED;
        return 0;
    }
    if (ready > 0 && (descriptors[0].revents & POLLNVAL) != 0) {
        *why = SERVE_BAD_DESCRIPTOR;
        return 0;
    }
    return ready <= 0 || descriptors[0].revents == 0;
}

/* Without the lock, so that transfers go on meanwhile. Whether there is nothing more
 * to be seen to before the next event. */
static int serve_peers(struct worker *worker)
{
    for (unsigned i = 0; i < SERVE_ROUNDS; i++) {
        if (served_progress(worker) == 0) {
            pthread_mutex_lock(&worker->served_lock);
            ucs_status_t status = ucx.ucp_worker_arm(worker->served);
            pthread_mutex_unlock(&worker->served_lock);
            return status == UCS_OK;
        }
    }
    return 0;
}

enum served worker_serve(struct worker *worker, int stop_fd)
{
    enum served why = SERVED;
    int goes_on = 1;
    worker->is_served = 1;
    worker->uses_count++;
    while (goes_on && worker->state == WORKER_OPEN) {
        worker_unlock(worker);
        int is_idle = serve_peers(worker);
        worker_lock(worker);
        if (worker->drivers_count == 0 &&
            (worker_progress(worker) != 0 ||
             ucx.ucp_worker_arm(worker->handle) != UCS_OK)) {
            is_idle = 0;
        }
        if (worker->state == WORKER_OPEN) {
            goes_on = serve_sleep(worker, stop_fd, is_idle ? -1 : 0, &why);
        }
    }
    worker->is_served = 0;
    worker->uses_count--;
    if (worker->state != WORKER_OPEN) {
        pthread_cond_broadcast(&worker->changed);
    }
    return why;
}
