/* The next token of each row from its logits, for CPUs with AVX-512: what sampler.py does for rows
   without top-k, top-p, min-p and penalties. A row is read twice; the second time it is in the L2 cache. */

#include "vectors.h"

enum {
    SUMS = 4,               /* vectors of sums */
    BLOCK = 8 * SUMS * LANES, /* logits whose weights are summed in float32; sums of blocks are in float64 */
};

/* The sum of exp(logits / temperature - top) of at most BLOCK logits. `weights` is NULL, or gets them, zeros
   up to a multiple of LANES. */
static float block_weight(const number *logits, ptrdiff_t count, float temperature, float top, float *weights) {
    vec sums[SUMS] = {{0}};
    ptrdiff_t i = 0;
    for (; !weights && i + SUMS * LANES <= count; i += SUMS * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; s++)
            sums[s] += exponential(load(logits + i + s * LANES) / temperature - top);
    for (; i < count; i += LANES) {
        vec part = i + LANES <= count ? load(logits + i) : load_some(logits + i, count - i, -INFINITY);
        vec weight = exponential(part / temperature - top);
        if (weights) *(vec *)(weights + i) = weight;
        sums[0] += weight;
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* The first token whose cumulative weight exceeds uniform times the total. bounds: cumulative weights of
   blocks. Tokens of weight 0 are never chosen. */
static ptrdiff_t chosen(const number *logits, ptrdiff_t count, float temperature, float top, double uniform,
                        const double *bounds, ptrdiff_t blocks) {
    float weights[BLOCK];
    double target = uniform * bounds[blocks - 1];
    ptrdiff_t block = 0;
    /* not beyond the last block that has any weight, whatever the rounding of target */
    while (bounds[block] <= target && bounds[block] < bounds[blocks - 1]) block++;
    double sum = block ? bounds[block - 1] : 0;
    ptrdiff_t first = block * BLOCK;
    ptrdiff_t in_block = count - first < BLOCK ? count - first : BLOCK;
    block_weight(logits + first, in_block, temperature, top, weights);
    ptrdiff_t last = 0;
    for (ptrdiff_t i = 0; i < in_block; i++)
        if (weights[i] > 0) {
            last = i;
            sum += weights[i];
            if (sum > target) break;
        }
    return first + last;
}

/* tokens, log_probs and valid of each row of logits [rows][stride], of which `count` are tokens. temperatures:
   one per row, or NULL: 1. greedy: rows that take the first of the likeliest tokens, or NULL: none. A row
   with logits that are no numbers is not valid. bounds: threads * blocks */
void strop_draw(const number *logits, const double *uniforms, const float *temperatures, const uint8_t *greedy,
                int64_t *tokens, float *log_probs, uint8_t *valid, double *bounds, ptrdiff_t rows,
                ptrdiff_t count, ptrdiff_t stride, int threads) {
    extern int omp_get_thread_num(void);
    ptrdiff_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        double *own = bounds + omp_get_thread_num() * blocks;
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t row = 0; row < rows; row++) {
            const number *from = logits + row * stride;
            float temperature = temperatures ? temperatures[row] : 1;
            float highest = largest_number(from, count);
            float top = highest / temperature;
            double total = 0;
            for (ptrdiff_t block = 0; block < blocks; block++) {
                ptrdiff_t left = count - block * BLOCK;
                total += block_weight(from + block * BLOCK, left < BLOCK ? left : BLOCK, temperature, top, NULL);
                own[block] = total;
            }
            valid[row] = isfinite(total);
            ptrdiff_t token = 0;
            if (valid[row] && greedy && greedy[row])
                while (load_some(from + token, 1, 0)[0] != highest) token++;
            else if (valid[row])
                token = chosen(from, count, temperature, top, uniforms[row], own, blocks);
            tokens[row] = token;
            log_probs[row] = load_some(from + token, 1, 0)[0] / temperature - top - (float)log(total);
        }
    }
}

/* Logits of a block */
int strop_block(void) { return BLOCK; }
