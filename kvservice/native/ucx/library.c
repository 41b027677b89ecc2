#include "library.h"

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "batch.h"
#include "log_ring.h"

struct ucx ucx;

static char loaded_path[PATH_MAX];

static void count_fork(void)
{
    ucx.fork_generation++;
    renew_log_lock();
}

/* The file that holds a function; "" where the loader cannot tell. */
static void find_file(void *function, char path[PATH_MAX])
{
    Dl_info place;
    path[0] = '\0';
    if (dladdr(function, &place) != 0 && place.dli_fname != NULL &&
        realpath(place.dli_fname, path) == NULL) {
        path[0] = '\0';
    }
}

static int resolve(void *handle, struct ucx *found, char *reason, size_t bytes)
{
#define UCX_RESOLVE(name)                                                      \
    found->name = (__typeof__(&name))dlsym(handle, #name);                     \
    if (found->name == NULL) {                                                 \
        snprintf(reason, bytes, "it has no function %s (UCX %d.%d and later have)", \
                 #name, API_MAJOR, API_MINOR);                                 \
        return -1;                                                             \
    }
    UCX_FUNCTIONS(UCX_RESOLVE)
#undef UCX_RESOLVE
    found->ucp_get_version(&found->major, &found->minor, &found->release);
    if (found->major != API_MAJOR || found->minor < API_MINOR) {
        snprintf(reason, bytes, "it is UCX %u.%u.%u; %d.%d or a later 1.x is needed",
                 found->major, found->minor, found->release, API_MAJOR, API_MINOR);
        return -1;
    }
    return 0;
}

/*
 * libucp finds libucs by its name alone: where another UCX is in the process
 * already, the loader hands out that one's, and two versions would be mixed.
 */
static int check_one_build(const struct ucx *found, char *reason, size_t bytes)
{
    char of_ucp[PATH_MAX], of_ucs[PATH_MAX], ucs_folder[PATH_MAX];
    find_file((void *)found->ucp_get_version, of_ucp);
    find_file((void *)found->ucs_status_string, of_ucs);
    strcpy(ucs_folder, of_ucs);
    char ucp_folder[PATH_MAX];
    strcpy(ucp_folder, of_ucp);
    if (strcmp(dirname(ucp_folder), dirname(ucs_folder)) == 0) {
        return 0;
    }
    snprintf(reason, bytes,
             "another UCX is in this process already: %.200s; choose its libucp.so.0",
             of_ucs);
    return -1;
}

/* Before a second library is mapped, since that alone would mix the two. */
static int is_other_file(const char *path)
{
    char file[PATH_MAX];
    return ucx.is_loaded && strchr(path, '/') != NULL &&
           (realpath(path, file) == NULL || strcmp(file, loaded_path) != 0);
}

/*
 * UCX takes a signal when it is loaded (SIGHUP, for its own log level), and more
 * where its environment says so. They stay the process's.
 */
static void *open_quietly(const char *path)
{
    struct sigaction before[NSIG], after;
    for (int number = 1; number < NSIG; number++) {
        sigaction(number, NULL, &before[number]);
    }
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int number = 1; number < NSIG; number++) {
        if (sigaction(number, NULL, &after) == 0 &&
            after.sa_sigaction != before[number].sa_sigaction) {
            sigaction(number, &before[number], NULL);
        }
    }
    return handle;
}

int load_library(const char *path, char *reason, size_t reason_bytes)
{
    if (is_other_file(path)) {
        snprintf(reason, reason_bytes, "this process uses %.300s already",
                 loaded_path);
        return -1;
    }
    void *handle = open_quietly(path);
    if (handle == NULL) {
        snprintf(reason, reason_bytes, "%s", dlerror());
        return -1;
    }
    struct ucx found = {.fork_generation = ucx.fork_generation};
    char file[PATH_MAX];
    if (resolve(handle, &found, reason, reason_bytes) < 0 ||
        check_one_build(&found, reason, reason_bytes) < 0) {
        return -1; /* It stays mapped: a library that started threads must. */
    }
    find_file((void *)found.ucp_get_version, file);
    if (ucx.is_loaded) {
        return 0; /* A name without a folder is whatever is loaded already. */
    }
    found.ucs_log_push_handler(keep_log_line);
    if (pthread_atfork(NULL, NULL, count_fork) != 0) {
        snprintf(reason, reason_bytes, "no memory for a fork handler");
        return -1;
    }
    strcpy(loaded_path, file);
    found.is_loaded = 1;
    ucx = found;
    return 0;
}

const char *library_path(void)
{
    return loaded_path;
}

const char *status_text(int status)
{
    switch (status) {
    case STATUS_OUTSIDE:
        return "Outside its segment";
    case STATUS_NOT_POSTED:
        return "Not posted";
    case STATUS_UNSETTLED:
        return "May still touch local memory";
    case STATUS_UNCONFIRMED:
        return "Not known to have arrived";
    default:
        return ucx.is_loaded ? ucx.ucs_status_string((ucs_status_t)status)
                             : "No UCX is loaded";
    }
}

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
