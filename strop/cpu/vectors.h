/* Vectors of 16 numbers, computed in float32, for CPUs with AVX-512. In memory they are float32, or bf16
   where a file is compiled with BF16. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 16

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));

static inline vec all(float x) { return x - (vec){0}; }

#ifdef BF16

#include <immintrin.h>

typedef uint16_t number;
typedef uint32_t words __attribute__((vector_size(64)));

static inline vec load(const number *from) {
    return (vec)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
}

/* The nearest number in bf16, in the upper half of each lane; of two the even one. NaN stays NaN. */
static inline words nearest(vec x) {
    words bits = (words)x;
    words is_nan = (words)(x != x);
    return ((bits + 0x7fff + (bits >> 16 & 1)) & ~is_nan) | (is_nan & 0x7fc00000);
}

static inline vec rounded(vec x) { return (vec)(nearest(x) & 0xffff0000); }

static inline void store(number *to, vec x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)(nearest(x) >> 16)));
}

#else

typedef float number;

static inline vec load(const number *from) { return *(const vec *)from; }

static inline vec rounded(vec x) { return x; }

static inline void store(number *to, vec x) { *(vec *)to = x; }

#endif

/* The first `count` numbers from `from` on; `other` in the lanes behind them. */
static inline vec load_some(const number *from, ptrdiff_t count, float other) {
    number some[LANES] = {0};
    for (ptrdiff_t i = 0; i < count && i < LANES; i++) some[i] = from[i];
    vec found = load(some);
    for (ptrdiff_t i = count; i < LANES; i++) found[i] = other;
    return found;
}

static inline void store_some(number *to, ptrdiff_t count, vec x) {
    number some[LANES];
    store(some, x);
    for (ptrdiff_t i = 0; i < count; i++) to[i] = some[i];
}

/* exp(x) for x <= 0, within 1e-7 of its value: 2^n exp(r) with |r| <= log(2) / 2. Below e^-87: 0. NaN stays
   NaN. */
static inline vec exponential(vec x) {
    const float round = 12582912; /* 1.5 * 2^23: what is added to it loses its fraction */
    ints is_zero = x < all(-87);
    x = (vec)((ints)x & ~is_zero);
    vec shifted = x * 1.44269504f + round;
    vec n = shifted - round;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log(2) in two numbers: the first product is exact */
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    vec power = (vec)(((ints)shifted - (ints)all(round) + 127) << 23);
    return (vec)((ints)(p * power) & ~is_zero);
}

/* The larger number of each lane; NaN where it is the second one. */
static inline vec larger(vec x, vec y) {
    ints first = x > y;
    return (vec)(((ints)x & first) | ((ints)y & ~first));
}

static inline float sum_of(vec x) {
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += x[j];
    return sum;
}

static inline float largest_of(vec x) {
    float top = x[0];
    for (int j = 1; j < LANES; j++) top = x[j] > top ? x[j] : top;
    return top;
}

/* The largest of count numbers, those that are NaN left out; -INFINITY of none */
static inline float largest_number(const number *from, ptrdiff_t count) {
    enum { PARTS = 4 };
    vec tops[PARTS];
    for (int s = 0; s < PARTS; s++) tops[s] = all(-INFINITY);
    ptrdiff_t i = 0;
    for (; i + PARTS * LANES <= count; i += PARTS * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < PARTS; s++) tops[s] = larger(load(from + i + s * LANES), tops[s]);
    for (; i < count; i += LANES) tops[0] = larger(load_some(from + i, count - i, -INFINITY), tops[0]);
    return largest_of(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
}
