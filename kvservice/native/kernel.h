/*
 * A kernel is the set of inner loops for one kind of processor: copy, sum
 * (CRC-32C), and both in one pass. One kernel is picked when the module loads,
 * by asking the processor, so that one build runs on every machine of an
 * architecture.
 *
 * `state` is the raw CRC register, that is, the bitwise complement of the
 * published CRC value; the loops chain it from piece to piece without the
 * complement.
 *
 * The fused loops sum the very bytes that they store, never a second read of
 * the source: another process may be writing the source meanwhile, and a
 * checksum of other bytes than those delivered would prove nothing.
 */
#ifndef KVSERVICE_KERNEL_H
#define KVSERVICE_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* Bytes in one stripe: a page, so that each stripe keeps a hardware
 * prefetcher stream of its own (they stop at page borders). */
#define STRIPE_BYTES 4096

#define CRC32C_POLYNOMIAL 0x82F63B78u /* Castagnoli, bits reflected. */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

struct kernel {
    const char *name;
    uint32_t (*sum)(uint32_t state, const uint8_t *source, size_t bytes);
    void (*copy_streaming)(uint8_t *target, const uint8_t *source, size_t bytes);
    uint32_t (*copy_sum)(uint32_t state, uint8_t *target, const uint8_t *source,
                         size_t bytes);
    uint32_t (*copy_sum_streaming)(uint32_t state, uint8_t *target,
                                   const uint8_t *source, size_t bytes);
    /* Orders streaming stores before all that the thread does afterwards. */
    void (*end_streaming)(void);
};

/* The kernel in use. Changed only with the GIL held. */
extern const struct kernel *active_kernel;

/* Builds the tables and picks the best kernel; called once, at module load. */
void choose_kernel(void);

/* The kernels that this processor can run, best first; NULL past the last. */
const struct kernel *runnable_kernel(size_t rank);

/* Constructors per architecture: NULL when the processor cannot run it. */
const struct kernel *kernel_avx512(void);
const struct kernel *kernel_avx2(void);
const struct kernel *kernel_sse42(void);
const struct kernel *kernel_sse2(void);
const struct kernel *kernel_arm_crc(void);

/* x to the power `exponent` modulo the CRC polynomial, bits reflected. */
uint32_t power_of_x(uint64_t exponent);

/* The state after STRIPE_BYTES zero bytes: lets the states of neighbouring
 * stripes be joined without reading the bytes again. */
uint32_t sum_skip_stripe(uint32_t state);

/* Portable loops, also used by kernels for what they do not speed up. */
uint32_t portable_sum(uint32_t state, const uint8_t *source, size_t bytes);
uint32_t portable_copy_sum(uint32_t state, uint8_t *target,
                           const uint8_t *source, size_t bytes);

#endif
