/*
 * Kernels for x86-64 without VPCLMULQDQ: the CRC instruction of SSE4.2, and
 * streaming copies 32 bytes (AVX2) or 16 bytes (SSE2) at a time. The instruction
 * sums 11 to 13 GB/s, so a fused copy reaches about 0.85 of memcpy from memory
 * and 0.65 of a streaming copy; prefetching and shorter stripes for the rest were
 * tried and gave nothing.
 */
#include "kernel.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define ON_CRC __attribute__((target("sse4.2")))
#define SUM_WIDTH uint64_t
#define SUM_WORD(state, word) _mm_crc32_u64((state), (word))
#define SUM_BYTE(state, byte) _mm_crc32_u8((state), (byte))
#define STREAM_WORD(place, word) \
    _mm_stream_si64((long long *)(void *)(place), (long long)(word))
#include "word_stripes.h"

#define COPY_STRIPES 4

#define LOAD_AVX2(place) _mm256_loadu_si256((const __m256i *)(const void *)(place))
#define STREAM_AVX2(place, value) \
    _mm256_stream_si256((__m256i *)(void *)(place), (value))
#define LOAD_SSE2(place) _mm_loadu_si128((const __m128i *)(const void *)(place))
#define STREAM_SSE2(place, value) \
    _mm_stream_si128((__m128i *)(void *)(place), (value))

/* Four pages side by side, for the reason told in kernel_avx512.c; the ends go
 * through memcpy. */
#define DEFINE_COPY_STREAMING(NAME, TARGET, VECTOR, LOAD, STREAM)              \
    __attribute__((target(TARGET))) static void NAME(                          \
        uint8_t *target, const uint8_t *source, size_t bytes)                  \
    {                                                                          \
        size_t done = (size_t)(-(uintptr_t)target) % 64;                       \
        done = done < bytes ? done : bytes;                                    \
        memcpy(target, source, done);                                          \
        size_t group_bytes = COPY_STRIPES * STRIPE_BYTES;                      \
        for (; bytes - done >= group_bytes; done += group_bytes) {             \
            for (size_t line = 0; line < STRIPE_BYTES; line += 64) {           \
                for (size_t i = 0; i < COPY_STRIPES; i++) {                    \
                    size_t at = done + i * STRIPE_BYTES + line;                \
                    VECTOR parts[64 / sizeof(VECTOR)];                         \
                    for (size_t j = 0; j < 64 / sizeof(VECTOR); j++) {         \
                        parts[j] = LOAD(source + at + j * sizeof(VECTOR));     \
                    }                                                          \
                    for (size_t j = 0; j < 64 / sizeof(VECTOR); j++) {         \
                        STREAM(target + at + j * sizeof(VECTOR), parts[j]);    \
                    }                                                          \
                }                                                              \
            }                                                                  \
        }                                                                      \
        memcpy(target + done, source + done, bytes - done);                    \
    }

DEFINE_COPY_STREAMING(copy_streaming_avx2, "avx2", __m256i, LOAD_AVX2,
                      STREAM_AVX2)
DEFINE_COPY_STREAMING(copy_streaming_sse2, "sse2", __m128i, LOAD_SSE2,
                      STREAM_SSE2)

static void end_streaming(void)
{
    _mm_sfence();
}

static const struct kernel avx2 = {
    .name = "avx2",
    .sum = words_sum,
    .copy_streaming = copy_streaming_avx2,
    .copy_sum = words_copy_sum,
    .copy_sum_streaming = words_copy_sum_streaming,
    .end_streaming = end_streaming,
};

static const struct kernel sse42 = {
    .name = "sse42",
    .sum = words_sum,
    .copy_streaming = copy_streaming_sse2,
    .copy_sum = words_copy_sum,
    .copy_sum_streaming = words_copy_sum_streaming,
    .end_streaming = end_streaming,
};

/* Without a CRC instruction the table walk is slower than memory, so there is
 * nothing for a streaming fused copy to win. */
static const struct kernel sse2 = {
    .name = "sse2",
    .sum = portable_sum,
    .copy_streaming = copy_streaming_sse2,
    .copy_sum = portable_copy_sum,
    .copy_sum_streaming = portable_copy_sum,
    .end_streaming = end_streaming,
};

const struct kernel *kernel_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("sse4.2")
               ? &avx2
               : NULL;
}

const struct kernel *kernel_sse42(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") ? &sse42 : NULL;
}

const struct kernel *kernel_sse2(void)
{
    return &sse2; /* Every x86-64 has it. */
}

#endif
