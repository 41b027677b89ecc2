/*
 * The UCX library of this process: loaded once, from a path that the caller
 * chose, each function found by name. Nothing is linked, so one build serves
 * every UCX since 1.13, and a process that never loads one pays nothing.
 */
#ifndef KVSERVICE_UCX_LIBRARY_H
#define KVSERVICE_UCX_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

/* The oldest UCX whose fields and functions are used here. */
#define API_MAJOR 1
#define API_MINOR 13

#define UCX_FUNCTIONS(X)        \
    X(ucp_get_version)          \
    X(ucp_config_read)          \
    X(ucp_config_modify)        \
    X(ucp_config_release)       \
    X(ucp_init_version)         \
    X(ucp_context_query)        \
    X(ucp_cleanup)              \
    X(ucp_worker_create)        \
    X(ucp_worker_destroy)       \
    X(ucp_worker_query)         \
    X(ucp_worker_release_address) \
    X(ucp_worker_get_efd)       \
    X(ucp_worker_arm)           \
    X(ucp_worker_progress)      \
    X(ucp_mem_map)              \
    X(ucp_mem_unmap)            \
    X(ucp_rkey_pack)            \
    X(ucp_rkey_buffer_release)  \
    X(ucp_ep_create)            \
    X(ucp_ep_close_nbx)         \
    X(ucp_ep_flush_nbx)         \
    X(ucp_ep_print_info)        \
    X(ucp_ep_rkey_unpack)       \
    X(ucp_rkey_destroy)         \
    X(ucp_get_nbx)              \
    X(ucp_put_nbx)              \
    X(ucp_request_free)         \
    X(ucs_status_string)        \
    X(ucs_log_push_handler)

#define UCX_FIELD(name) __typeof__(&name) name;

struct ucx {
    UCX_FUNCTIONS(UCX_FIELD)
    int is_loaded;
    unsigned major, minor, release;
    /* Moves in a forked child: what was made before belongs to the parent. */
    unsigned fork_generation;
};

/* Filled by load_library with the GIL held, and not changed afterwards. */
extern struct ucx ucx;

/* Returns 0, or -1 with the reason in `reason`. The same path again is fine. */
int load_library(const char *path, char *reason, size_t reason_bytes);

/* The directory and name that the loaded library has; "" before that. */
const char *library_path(void);

/* Words for a status of UCX or of batch.h. */
const char *status_text(int status);

/* Nanoseconds of CLOCK_MONOTONIC, the clock of every deadline here. */
int64_t monotonic_ns(void);

#endif
