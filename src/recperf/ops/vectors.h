/* Vectors of floats for the C bodies of ops, whatever the processor: the compiler makes its own instructions of them. */

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define ALWAYS static inline __attribute__((always_inline))
/* Inner loops are functions of their own: inlined into a larger one, their sums do not stay in registers. */
#define APART static __attribute__((noinline))

/* The number in every lane: subtracting 0 changes none, and compilers leave it out. */
ALWAYS vec spread(float value) { return value - (vec){0}; }

/* a * b + c, rounded once where `fused` says so and the processor can. */
ALWAYS vec mul_add(vec a, vec b, vec c, int fused) {
#if defined(__aarch64__)
    if (fused) return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
    if (fused) return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    if (fused) return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
    return a * b + c;
}

ALWAYS vec blend(ivec which, vec yes, vec no) { return (vec)(((ivec)yes & which) | ((ivec)no & ~which)); }

/* The larger of each two; where either is no number, on x86 the second. */
ALWAYS vec larger(vec a, vec b) {
#if defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return blend(a > b, a, b);
#endif
}
