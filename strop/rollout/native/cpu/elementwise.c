/* RMS norms, gated activations and rotary embeddings, for CPUs with AVX-512: each number is read once, where a
   chain of functions reads and writes it for every sum and product. Where such a chain rounds to bf16 between
   two of them, so is rounded here. The sums of a row do not depend on other rows or on the number of
   threads. */

#include "vectors.h"

enum { SUMS = 4 /* vectors of sums */ };

/* out[rows][size] = x / sqrt(mean(x^2) + epsilon) * weight */
void strop_rms_norm(const number *x, const number *weight, number *out, ptrdiff_t rows, ptrdiff_t size,
                    float epsilon, int threads) {
    ptrdiff_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const number *from = x + row * size;
        number *to = out + row * size;
        vec sums[SUMS] = {{0}};
        ptrdiff_t i = 0;
        for (; i + SUMS * LANES <= size; i += SUMS * LANES)
#pragma GCC unroll 4
            for (int s = 0; s < SUMS; s++) {
                vec part = load(from + i + s * LANES);
                sums[s] += part * part;
            }
        for (; i < size; i += LANES) {
            vec part = i < whole ? load(from + i) : load_some(from + i, size - i, 0);
            sums[0] += part * part;
        }
        float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
        float scale = 1 / sqrtf(sum / size + epsilon);
        for (i = 0; i < whole; i += LANES) store(to + i, rounded(load(from + i) * scale) * load(weight + i));
        if (whole < size) {
            ptrdiff_t left = size - whole;
            vec part = rounded(load_some(from + whole, left, 0) * scale);
            store_some(to + whole, left, part * load_some(weight + whole, left, 0));
        }
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
void strop_gated_silu(const number *gate, const number *up, number *out, ptrdiff_t count, int threads) {
    ptrdiff_t whole = count / LANES * LANES;
    ptrdiff_t left = count - whole;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t i = 0; i < whole; i += LANES)
        store(out + i, rounded(silu(load(gate + i))) * load(up + i));
    if (left)
        store_some(out + whole, left,
                   rounded(silu(load_some(gate + whole, left, 0))) * load_some(up + whole, left, 0));
}

/* The first and the second half of a head, at most LANES numbers of each, turned */
static inline void turn(const number *from, const number *cos, const number *sin, number *to, ptrdiff_t half,
                        ptrdiff_t count) {
    int whole = count >= LANES;
    vec parts[2][3];
    for (int second = 0; second < 2; second++) {
        const number *all_of[3] = {from, cos, sin};
        for (int n = 0; n < 3; n++) {
            const number *source = all_of[n] + second * half;
            parts[second][n] = whole ? load(source) : load_some(source, count, 0);
        }
    }
    vec first = rounded(parts[0][0] * parts[0][1]) - rounded(parts[1][0] * parts[0][2]);
    vec last = rounded(parts[1][0] * parts[1][1]) + rounded(parts[0][0] * parts[1][2]);
    if (whole) {
        store(to, first);
        store(to + half, last);
    } else {
        store_some(to, count, first);
        store_some(to + half, count, last);
    }
}

/* Rotary embeddings: out = x cos + rotate_half(x) sin, for x and out [batch][heads][length][size] with these
   strides (the last one is 1) and cos and sin [batch or 1][length][size]. */
void strop_rotary(const number *x, const number *cos, const number *sin, number *out, ptrdiff_t batch,
                  ptrdiff_t heads, ptrdiff_t length, ptrdiff_t size, const ptrdiff_t *strides,
                  const ptrdiff_t *out_strides, ptrdiff_t cos_stride, int threads) {
    ptrdiff_t half = size / 2;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (ptrdiff_t b = 0; b < batch; b++)
        for (ptrdiff_t t = 0; t < length; t++) {
            const number *c = cos + b * cos_stride + t * size;
            const number *s = sin + b * cos_stride + t * size;
            for (ptrdiff_t h = 0; h < heads; h++) {
                const number *from = x + b * strides[0] + h * strides[1] + t * strides[2];
                number *to = out + b * out_strides[0] + h * out_strides[1] + t * out_strides[2];
                for (ptrdiff_t i = 0; i < half; i += LANES) turn(from + i, c + i, s + i, to + i, half, half - i);
            }
        }
}
