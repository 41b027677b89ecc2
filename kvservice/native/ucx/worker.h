/*
 * A worker: a UCX context with two UCX workers, the locks around them, and the
 * rules by which threads share them. Nothing here knows Python; the callers have
 * let go of the GIL, and whoever holds a lock never takes it.
 *
 * Two halves. `served` is the one whose address peers are given, `handle` the one
 * that connects to peers. One for both would not do: UCX makes one connection of an
 * endpoint and of the peer's own endpoint in the other direction, refuses it where
 * their error handling differs, and cutting off one of them ends the other.
 *
 * The lock. Every call into UCX for `handle` is made with the worker's lock held,
 * so UCX is told SERIALIZED and does not lock for each operation. Callbacks run
 * inside such calls; they and everything marked [lock] need no more. Waiters get
 * the lock in turn: a thread that lets go and comes back stands behind them. For
 * `served` there is `served_lock`, taken with or without the lock, and never the
 * other way round.
 *
 * Sleeping. A call that waits makes progress itself for a moment, then sleeps. One
 * sleeper polls UCX's descriptor for all; the others wait on `changed`. `serve`
 * sleeps on its own, and leaves `handle` to the calls while there are any.
 */
#ifndef KVSERVICE_UCX_WORKER_H
#define KVSERVICE_UCX_WORKER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "library.h"

/* Progress without effect for this long before a call goes to sleep: about what
 * falling asleep and waking up cost. */
#define SPIN_NS 20000

/* How long closing waits for endpoints whose peer may not answer any more. */
#define CLOSE_GRACE_NS 200000000

enum refusal {
    REFUSED_NOT = 0,
    REFUSED_FORKED,
    REFUSED_CLOSED,
    REFUSED_POISONED,
    REFUSED_BUSY,
    REFUSED_FOREIGN,
};

enum worker_state { WORKER_OPEN, WORKER_CLOSING, WORKER_CLOSED };

struct batch;
struct endpoint;
struct registration;

/* A request of UCX that touches no memory of ours: a flush or a close. It outlives
 * a caller who gives up on it. */
struct tracker {
    struct worker *worker;
    struct tracker *next_orphan;
    ucs_status_t status;
    int is_done;
    int is_orphan;
};

struct worker {
    ucp_context_h context;
    ucp_worker_h handle;
    ucp_worker_h served;
    int event_fd;        /* of handle, UCX's */
    int served_event_fd; /* of served, UCX's */
    int wake_fd;  /* wakes the sleeper that polls event_fd */
    int serve_fd; /* wakes serve */
    unsigned fork_generation;

    pthread_mutex_t served_lock;
    pthread_mutex_t next; /* held by the one waiter who gets the lock next */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned waiting_count; /* atomic: threads that want the lock */

    /* [lock] from here on */
    enum worker_state state;
    int is_poisoned;
    unsigned uses_count;    /* calls under way, `serve` too; closing waits for them */
    unsigned drivers_count; /* those that make progress until they leave */
    unsigned sleepers_count;
    int is_polled;    /* a sleeper polls event_fd */
    int is_touched;   /* something was posted since event_fd was armed */
    int has_ended;    /* something that a sleeper waits for */
    int is_served;
    int is_serve_asleep;
    int must_wake_serve; /* its arming may be used up */
    uint64_t batch_serial;
    struct endpoint *endpoints;
    struct registration *registrations;
    struct tracker *orphans;
    struct batch *abandoned;
};

struct setting {
    const char *name; /* without the prefix UCX_ */
    const char *value;
};

/* Returns UCX's status; on an error `failed` says what could not be done. */
ucs_status_t worker_open(struct worker *worker, const struct setting *settings,
                         size_t count, char *failed, size_t failed_bytes);

/* Ends what is under way and gives everything back; safe to call twice, and from
 * two threads. In a forked child it only forgets. */
void worker_close(struct worker *worker);

/* Takes the lock, unless the worker is closed or belongs to another process. */
enum refusal worker_enter(struct worker *worker);
/* The same before the memory of something that the worker lists is freed: waits for
 * a close that is under way. 0: the worker lists nothing any more. */
int worker_enter_to_free(struct worker *worker);
void worker_leave(struct worker *worker);

/* The bare lock. */
void worker_lock(struct worker *worker);
void worker_unlock(struct worker *worker);
/* Lets those who wait for the lock go first. */
void worker_yield(struct worker *worker);

/* Between these two the caller may let go of the lock, and makes progress. */
void worker_begin(struct worker *worker);
void worker_end(struct worker *worker);

/* Progress of `handle`, once; returns whether anything moved. */
unsigned worker_progress(struct worker *worker);
/* The same of `served`; takes its lock. */
unsigned served_progress(struct worker *worker);

/* One round of a call that waits: progress, and sleep once nothing has moved for a
 * moment, until `until_ns` at most. `idle_since_ns` starts as 0. `is_asleep` is set
 * while it sleeps, for the callbacks that would end its wait. */
void worker_round(struct worker *worker, int64_t *idle_since_ns, int *is_asleep,
                  int64_t until_ns);

/* Wakes every sleeper, and serve: the state has changed. */
void worker_wake_all(struct worker *worker);

enum served { SERVED, SERVE_INTERRUPTED, SERVE_BAD_DESCRIPTOR };

/* Progress of both halves until idle, then sleep; until `stop_fd` can be read, a signal comes, or
 * the worker closes. One thread at a time (`is_served`). */
enum served worker_serve(struct worker *worker, int stop_fd);

/* A tracker for one request, filled in by what UCX answered. */
struct tracker *tracker_new(struct worker *worker, ucp_request_param_t *parameters);
void tracker_started(struct tracker *tracker, ucs_status_ptr_t answer);
void tracker_drop(struct tracker *tracker);

/* Lists linked through `previous` and `next`. */
#define LIST_ADD(head, item)               \
    do {                                   \
        (item)->previous = NULL;           \
        (item)->next = (head);             \
        if ((head) != NULL) {              \
            (head)->previous = (item);     \
        }                                  \
        (head) = (item);                   \
    } while (0)

#define LIST_REMOVE(head, item)                          \
    do {                                                 \
        if ((item)->previous != NULL) {                  \
            (item)->previous->next = (item)->next;       \
        } else {                                         \
            (head) = (item)->next;                       \
        }                                                \
        if ((item)->next != NULL) {                      \
            (item)->next->previous = (item)->previous;   \
        }                                                \
    } while (0)

#endif
