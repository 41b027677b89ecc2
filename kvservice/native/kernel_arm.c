/*
 * Kernel for aarch64 with the CRC extension (all ARMv8.1 and nearly all
 * ARMv8.0 servers). There is no streaming store here: the C library's memcpy
 * already uses what the core has for long copies.
 */
#include "kernel.h"

#if defined(__aarch64__)

#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define ON_CRC __attribute__((target("crc")))
#else
#define ON_CRC __attribute__((target("+crc")))
#endif
#define SUM_WIDTH uint32_t
#define SUM_WORD(state, word) __crc32cd((state), (word))
#define SUM_BYTE(state, byte) __crc32cb((state), (byte))
#define STREAM_WORD(place, word) memcpy((place), &(word), 8)
#include "word_stripes.h"

static void copy(uint8_t *target, const uint8_t *source, size_t bytes)
{
    memcpy(target, source, bytes);
}

static void end_streaming(void)
{
}

static const struct kernel arm_crc = {
    .name = "arm-crc",
    .sum = words_sum,
    .copy_streaming = copy,
    .copy_sum = words_copy_sum,
    .copy_sum_streaming = words_copy_sum_streaming,
    .end_streaming = end_streaming,
};

const struct kernel *kernel_arm_crc(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) ? &arm_crc : NULL;
#elif defined(__APPLE__)
    return &arm_crc;
#else
    return NULL;
#endif
}

#endif
