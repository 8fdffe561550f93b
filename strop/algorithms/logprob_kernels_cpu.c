/* One pass over the logits of a row, forward and backward, for CPUs with AVX-512: see logprobs.py for the
   formulas. A row is read twice forward; the second time it is in the L2 cache. */

#include "vectors.h"

enum {
    SUMS = 4,                 /* vectors of sums */
    BLOCK = 8 * SUMS * LANES, /* logits that are summed in float32; sums of blocks are in float64 */
};

static const float FLOOR = -1e4f; /* stands for log 0 in p log p */

/* total += exp(s) and weighted += s exp(s) over one block, for s = logits / temperature - top */
static void add_block(const number *logits, ptrdiff_t count, float temperature, float top, int entropy,
                      double *total, double *weighted) {
    vec totals[SUMS] = {{0}};
    vec weights[SUMS] = {{0}};
    ptrdiff_t i = 0;
    for (; i + SUMS * LANES <= count; i += SUMS * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < SUMS; k++) {
            vec s = load(logits + i + k * LANES) / temperature - top;
            vec p = exponential(s);
            totals[k] += p;
            if (entropy) weights[k] += (vec)((ints)(s * p) & (s > all(FLOOR)));
        }
    for (; i < count; i += LANES) {
        vec s = load_some(logits + i, count - i, -INFINITY) / temperature - top;
        vec p = exponential(s);
        totals[0] += p;
        if (entropy) weights[0] += (vec)((ints)(s * p) & (s > all(FLOOR)));
    }
    *total += sum_of((totals[0] + totals[1]) + (totals[2] + totals[3]));
    *weighted += sum_of((weights[0] + weights[1]) + (weights[2] + weights[3]));
}

/* Of each row of logits [rows][stride], of which `count` are tokens: the log-prob of its label (0 for a label
   below 0), its normaliser (largest z, log of the sum of exp(z - largest)), and its entropy, unless entropies is
   NULL. */
void strop_row_statistics(const number *logits, const int64_t *labels, float *log_probs, float *normaliser,
                          float *entropies, ptrdiff_t rows, ptrdiff_t count, ptrdiff_t stride,
                          float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const number *from = logits + row * stride;
        float top = largest_number(from, count) / temperature;
        double total = 0;
        double weighted = 0;
        for (ptrdiff_t i = 0; i < count; i += BLOCK)
            add_block(from + i, count - i < BLOCK ? count - i : BLOCK, temperature, top, entropies != NULL, &total,
                      &weighted);
        float log_total = (float)log(total);
        ptrdiff_t label = labels[row];
        log_probs[row] = label < 0 ? 0 : load_some(from + label, 1, 0)[0] / temperature - top - log_total;
        normaliser[2 * row] = top;
        normaliser[2 * row + 1] = log_total;
        if (entropies) entropies[row] = (float)(log(total) - weighted / total);
    }
}

struct slope {
    float temperature, top, log_total, entropy, of_log_prob, of_entropy;
    int wants_entropy;
};

/* The derivative with respect to the logits, without what only the label has */
static inline vec slope_of(vec logits, const struct slope *row) {
    vec log_p = logits / row->temperature - row->top - row->log_total;
    vec found = all(-row->of_log_prob);
    if (row->wants_entropy) found -= row->of_entropy * (larger(log_p, all(FLOOR)) + row->entropy);
    return found * exponential(log_p);
}

/* The logits [rows][count] are replaced by derivatives with respect to them, given those with respect to
   log-probs and entropies, each of which may be NULL. */
void strop_row_slopes(number *logits, const int64_t *labels, const float *normaliser, const float *entropies,
                      const float *grad_log_probs, const float *grad_entropies, ptrdiff_t rows, ptrdiff_t count,
                      float temperature, int threads) {
    ptrdiff_t whole = count / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t row = 0; row < rows; row++) {
        number *at = logits + row * count;
        ptrdiff_t label = labels[row];
        struct slope own = {temperature, normaliser[2 * row], normaliser[2 * row + 1]};
        if (grad_log_probs && label >= 0) own.of_log_prob = grad_log_probs[row];
        if (entropies && grad_entropies) {
            own.wants_entropy = 1;
            own.entropy = entropies[row];
            own.of_entropy = grad_entropies[row];
        }
        vec of_label = label < 0 ? all(0) : slope_of(load_some(at + label, 1, -INFINITY), &own) + own.of_log_prob;
        for (ptrdiff_t i = 0; i < whole; i += LANES) store(at + i, slope_of(load(at + i), &own) / temperature);
        if (whole < count) {
            vec last = load_some(at + whole, count - whole, -INFINITY);
            store_some(at + whole, count - whole, slope_of(last, &own) / temperature);
        }
        if (label >= 0) store_some(at + label, 1, of_label / temperature);
    }
}
