/* Choice of the kernel, and the portable one, which needs nothing but C11. */
#include "kernel.h"

#include <string.h>

#define KERNELS_MAX 8

static uint32_t byte_tables[8][256];
static uint32_t skip_tables[4][256];
static const struct kernel *runnable[KERNELS_MAX + 1];

const struct kernel *active_kernel;

/* Product of two polynomials modulo the CRC polynomial, bits reflected. */
static uint32_t multiply(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (left & bit) {
            product ^= right;
        }
        right = (right >> 1) ^ ((right & 1) ? CRC32C_POLYNOMIAL : 0);
    }
    return product;
}

uint32_t power_of_x(uint64_t exponent)
{
    uint32_t result = 0x80000000u; /* x to the power 0. */
    uint32_t square = 0x40000000u; /* x to the power 1. */
    for (; exponent != 0; exponent >>= 1) {
        if (exponent & 1) {
            result = multiply(result, square);
        }
        square = multiply(square, square);
    }
    return result;
}

static void build_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++) {
            state = (state >> 1) ^ ((state & 1) ? CRC32C_POLYNOMIAL : 0);
        }
        byte_tables[0][byte] = state;
    }
    uint32_t skip = power_of_x(STRIPE_BYTES * 8);
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int row = 1; row < 8; row++) {
            uint32_t before = byte_tables[row - 1][byte];
            byte_tables[row][byte] =
                (before >> 8) ^ byte_tables[0][before & 0xFF];
        }
        for (int row = 0; row < 4; row++) {
            skip_tables[row][byte] = multiply(byte << (8 * row), skip);
        }
    }
}

uint32_t sum_skip_stripe(uint32_t state)
{
    return skip_tables[0][state & 0xFF] ^ skip_tables[1][(state >> 8) & 0xFF] ^
           skip_tables[2][(state >> 16) & 0xFF] ^ skip_tables[3][state >> 24];
}

uint32_t portable_sum(uint32_t state, const uint8_t *source, size_t bytes)
{
    for (; bytes >= 8; bytes -= 8, source += 8) {
        uint32_t low, high;
        memcpy(&low, source, 4);
        memcpy(&high, source + 4, 4);
        low ^= state;
        state = byte_tables[7][low & 0xFF] ^ byte_tables[6][(low >> 8) & 0xFF] ^
                byte_tables[5][(low >> 16) & 0xFF] ^ byte_tables[4][low >> 24] ^
                byte_tables[3][high & 0xFF] ^
                byte_tables[2][(high >> 8) & 0xFF] ^
                byte_tables[1][(high >> 16) & 0xFF] ^ byte_tables[0][high >> 24];
    }
    for (; bytes != 0; bytes--, source++) {
        state = (state >> 8) ^ byte_tables[0][(state ^ *source) & 0xFF];
    }
    return state;
}

uint32_t portable_copy_sum(uint32_t state, uint8_t *target,
                           const uint8_t *source, size_t bytes)
{
    /* A stripe at a time, so that the sum finds the target in the cache. */
    while (bytes != 0) {
        size_t step = bytes < STRIPE_BYTES ? bytes : STRIPE_BYTES;
        memcpy(target, source, step);
        state = portable_sum(state, target, step);
        target += step;
        source += step;
        bytes -= step;
    }
    return state;
}

static void portable_copy(uint8_t *target, const uint8_t *source, size_t bytes)
{
    memcpy(target, source, bytes);
}

static void portable_end(void)
{
}

static const struct kernel portable = {
    .name = "portable",
    .sum = portable_sum,
    .copy_streaming = portable_copy,
    .copy_sum = portable_copy_sum,
    .copy_sum_streaming = portable_copy_sum,
    .end_streaming = portable_end,
};

void choose_kernel(void)
{
    const struct kernel *found[] = {
#if defined(__x86_64__)
        kernel_avx512(), kernel_avx2(), kernel_sse42(), kernel_sse2(),
#elif defined(__aarch64__)
        kernel_arm_crc(),
#endif
        &portable,
    };
    build_tables();
    size_t count = 0;
    for (size_t i = 0; i < sizeof(found) / sizeof(*found); i++) {
        if (found[i] != NULL) {
            runnable[count++] = found[i];
        }
    }
    active_kernel = runnable[0];
}

const struct kernel *runnable_kernel(size_t rank)
{
    return rank < KERNELS_MAX ? runnable[rank] : NULL;
}
