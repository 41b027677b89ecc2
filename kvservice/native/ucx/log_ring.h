/*
 * What UCX has to say. It prints to standard output by itself, which would break
 * whatever is spoken there; here its lines are kept in memory until asked for.
 */
#ifndef KVSERVICE_UCX_LOG_RING_H
#define KVSERVICE_UCX_LOG_RING_H

#include <stddef.h>

#include <ucs/debug/log_def.h>

#define LOG_LINES 256u /* The oldest go first. */
#define LOG_LINE_BYTES 480u

/* UCX's log handler, called on any thread, with UCX's locks held and no GIL. */
ucs_log_func_rc_t keep_log_line(const char *file, unsigned line,
                                const char *function, ucs_log_level_t level,
                                const ucs_log_component_config_t *component,
                                const char *format, va_list arguments);

/* In a forked child: a thread that held the lock is not there to let go of it. */
void renew_log_lock(void);

/* Takes the oldest line out; 0 when there is none. */
int take_log_line(char text[LOG_LINE_BYTES]);

/* How many lines were pushed out unread since this was last asked. */
size_t take_lost_lines(void);

#endif
