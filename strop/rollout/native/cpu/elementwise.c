/* RMS norms and gated activations in float32, for CPUs with AVX-512: each number is read once, where a chain
   of functions reads and writes it for every sum and product. The sums of a row do not depend on other rows
   or on the number of threads. */

#include "vectors.h"

enum { SUMS = 4 /* vectors of sums */ };

/* out[rows][size] = x / sqrt(mean(x^2) + epsilon) * weight */
void strop_rms_norm(const float *x, const float *weight, float *out, ptrdiff_t rows, ptrdiff_t size,
                    float epsilon, int threads) {
    ptrdiff_t whole = size / (SUMS * LANES) * (SUMS * LANES);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = out + row * size;
        vec sums[SUMS] = {{0}};
        for (ptrdiff_t i = 0; i < whole; i += SUMS * LANES)
#pragma GCC unroll 4
            for (int s = 0; s < SUMS; s++) {
                vec part = *(const vec *)(from + i + s * LANES);
                sums[s] += part * part;
            }
        float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (ptrdiff_t i = whole; i < size; i++) sum += from[i] * from[i];
        float scale = 1 / sqrtf(sum / size + epsilon);
        for (ptrdiff_t i = 0; i < whole; i += LANES)
            *(vec *)(to + i) = *(const vec *)(from + i) * scale * *(const vec *)(weight + i);
        for (ptrdiff_t i = whole; i < size; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* x / (1 + exp(-x)) */
static inline vec silu(vec x) {
    vec weight = exponential((vec)((ints)x | (ints)all(-0.0f))); /* exp(-|x|) */
    ints negative = x < all(0);
    vec top = (vec)(((ints)weight & negative) | ((ints)all(1) & ~negative));
    return x * (top / (1 + weight));
}

/* out[count] = silu(gate) * up */
void strop_gated_silu(const float *gate, const float *up, float *out, ptrdiff_t count, int threads) {
    ptrdiff_t whole = count / LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t i = 0; i < whole; i++)
        *(vec *)(out + i * LANES) =
            silu(*(const vec *)(gate + i * LANES)) * *(const vec *)(up + i * LANES);
    for (ptrdiff_t i = whole * LANES; i < count; i++) out[i] = silu(all(gate[i]))[0] * up[i];
}

/* Rotary embeddings: out = x cos + rotate_half(x) sin, for x and out [batch][heads][length][size] with these
   strides (the last one is 1) and cos and sin [batch or 1][length][size]. */
void strop_rotary(const float *x, const float *cos, const float *sin, float *out, ptrdiff_t batch,
                  ptrdiff_t heads, ptrdiff_t length, ptrdiff_t size, const ptrdiff_t *strides,
                  const ptrdiff_t *out_strides, ptrdiff_t cos_stride, int threads) {
    ptrdiff_t half = size / 2;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (ptrdiff_t b = 0; b < batch; b++)
        for (ptrdiff_t t = 0; t < length; t++) {
            const float *c = cos + b * cos_stride + t * size;
            const float *s = sin + b * cos_stride + t * size;
            for (ptrdiff_t h = 0; h < heads; h++) {
                const float *restrict from = x + b * strides[0] + h * strides[1] + t * strides[2];
                float *restrict to = out + b * out_strides[0] + h * out_strides[1] + t * out_strides[2];
                for (ptrdiff_t i = 0; i < half; i++) {
                    to[i] = from[i] * c[i] - from[i + half] * s[i];
                    to[i + half] = from[i + half] * c[i + half] + from[i] * s[i + half];
                }
            }
        }
}
