/*
 * Sweeps for processors with an instruction that sums eight bytes. The
 * instruction gives a result every cycle but takes three, so three stripes go
 * side by side. Included by one kernel file, which defines first:
 *   ON_CRC                    the target attribute
 *   SUM_WIDTH                 the type in which the instruction keeps the state:
 *                             a conversion at each step would lengthen the chain
 *   SUM_WORD(state, word)     eight bytes into the state
 *   SUM_BYTE(state, byte)     one byte
 *   STREAM_WORD(place, word)  a non-temporal store where there is one
 */
#include "kernel.h"

#include <string.h>

#define WORD_STRIPES 3

enum put { PUT_NOTHING, PUT_CACHED, PUT_STREAMING };

ON_CRC ALWAYS_INLINE void put_word(uint8_t *target, uint64_t word, enum put put)
{
    if (put == PUT_STREAMING) {
        STREAM_WORD(target, word);
    } else if (put == PUT_CACHED) {
        memcpy(target, &word, 8);
    }
}

ON_CRC ALWAYS_INLINE uint32_t sweep_line(uint32_t state, uint8_t *target,
                                         const uint8_t *source, size_t bytes,
                                         enum put put)
{
    for (; bytes >= 8; bytes -= 8, source += 8, target += 8) {
        uint64_t word;
        memcpy(&word, source, 8);
        put_word(target, word, put);
        state = (uint32_t)SUM_WORD(state, word);
    }
    for (; bytes != 0; bytes--, source++, target++) {
        uint8_t byte = *source;
        if (put != PUT_NOTHING) {
            *target = byte;
        }
        state = SUM_BYTE(state, byte);
    }
    return state;
}

ON_CRC ALWAYS_INLINE uint32_t sweep_words(uint32_t state, uint8_t *target,
                                          const uint8_t *source, size_t bytes,
                                          enum put put)
{
    size_t done = 0;
    if (put == PUT_STREAMING) {
        done = (size_t)(-(uintptr_t)target) % 8;
        done = done < bytes ? done : bytes;
        state = sweep_line(state, target, source, done, PUT_CACHED);
    }
    for (; bytes - done >= WORD_STRIPES * STRIPE_BYTES;
         done += WORD_STRIPES * STRIPE_BYTES) {
        SUM_WIDTH sums[WORD_STRIPES] = {state, 0, 0};
        for (size_t at = 0; at < STRIPE_BYTES; at += 8) {
            uint64_t words[WORD_STRIPES];
#pragma GCC unroll 3
            for (size_t i = 0; i < WORD_STRIPES; i++) {
                memcpy(&words[i], source + done + i * STRIPE_BYTES + at, 8);
            }
#pragma GCC unroll 3
            for (size_t i = 0; i < WORD_STRIPES; i++) {
                put_word(target + done + i * STRIPE_BYTES + at, words[i], put);
                sums[i] = SUM_WORD(sums[i], words[i]);
            }
        }
        state = sum_skip_stripe((uint32_t)sums[0]) ^ (uint32_t)sums[1];
        state = sum_skip_stripe(state) ^ (uint32_t)sums[2];
    }
    return sweep_line(state, target + done, source + done, bytes - done, put);
}

ON_CRC static uint32_t words_sum(uint32_t state, const uint8_t *source,
                                 size_t bytes)
{
    /* The target is never touched; the source stands in so that the address
     * arithmetic stays within one object. */
    return sweep_words(state, (uint8_t *)source, source, bytes, PUT_NOTHING);
}

ON_CRC static uint32_t words_copy_sum(uint32_t state, uint8_t *target,
                                      const uint8_t *source, size_t bytes)
{
    return sweep_words(state, target, source, bytes, PUT_CACHED);
}

ON_CRC static uint32_t words_copy_sum_streaming(uint32_t state, uint8_t *target,
                                                const uint8_t *source,
                                                size_t bytes)
{
    return sweep_words(state, target, source, bytes, PUT_STREAMING);
}
