#include "log_ring.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[LOG_LINES][LOG_LINE_BYTES];
static size_t first, count, lost;

static const char *level_word(ucs_log_level_t level)
{
    switch (level) {
    case UCS_LOG_LEVEL_FATAL:
        return "fatal";
    case UCS_LOG_LEVEL_ERROR:
        return "error";
    case UCS_LOG_LEVEL_WARN:
        return "warning";
    default:
        return level <= UCS_LOG_LEVEL_INFO ? "info" : "debug";
    }
}

ucs_log_func_rc_t keep_log_line(const char *file, unsigned line,
                                const char *function, ucs_log_level_t level,
                                const ucs_log_component_config_t *component,
                                const char *format, va_list arguments)
{
    char message[LOG_LINE_BYTES];
    const char *name = strrchr(file, '/');
    (void)function;
    (void)component;
    vsnprintf(message, sizeof(message), format, arguments);
    pthread_mutex_lock(&lock);
    if (count == LOG_LINES) {
        first = (first + 1) % LOG_LINES;
        count--;
        lost++;
    }
    /* The message is cut so that the place at its end is always whole. */
    snprintf(lines[(first + count) % LOG_LINES], LOG_LINE_BYTES, "%s: %.*s (%.60s:%u)",
             level_word(level), (int)LOG_LINE_BYTES - 96, message,
             name ? name + 1 : file, line);
    count++;
    pthread_mutex_unlock(&lock);
    return UCS_LOG_FUNC_RC_STOP;
}

void renew_log_lock(void)
{
    pthread_mutex_init(&lock, NULL);
}

int take_log_line(char text[LOG_LINE_BYTES])
{
    pthread_mutex_lock(&lock);
    int is_there = count != 0;
    if (is_there) {
        memcpy(text, lines[first], LOG_LINE_BYTES);
        first = (first + 1) % LOG_LINES;
        count--;
    }
    pthread_mutex_unlock(&lock);
    return is_there;
}

size_t take_lost_lines(void)
{
    pthread_mutex_lock(&lock);
    size_t answer = lost;
    lost = 0;
    pthread_mutex_unlock(&lock);
    return answer;
}
