/* Vectors of 16 numbers in float32, for CPUs with AVX-512. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 16

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));

static inline vec all(float x) { return x - (vec){0}; }

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
