/* Causal attention inside packed sequences in bf16, forward and backward, for CPUs with AMX. A task is a
   sequence with a key head and the query heads that share it. Sequences are padded to blocks of 32 tokens.

   With s = scale q k^T, p = exp(s - lse) and D = sum(dO o) of a query:

       dV = p^T dO     dS = scale p (dO v^T - D)     dQ = dS k     dK = dS^T q

   Backward, scores are computed with keys as rows, so that p^T and dS^T are rows of the next products as they
   are; dQ^T = k^T dS^T. Products are of bf16 and summed in float32; p and dS are rounded to bf16 between two of
   them. The numbers of a sequence do not depend on others or on the number of threads. */

#define BF16
#include "vectors.h"

#include "tiles.h"

enum {
    SPAN = 2 * SIDE, /* tokens of a block */
    KEYS = 128,      /* keys of which p^T and dS^T exist at a time */
    SUM = SIDE * SIDE,
};

static const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* [tokens][heads][size] with these distances between tokens and heads */
struct states {
    const number *at;
    ptrdiff_t token, head;
};

static inline ptrdiff_t padded(ptrdiff_t count) { return (count + SPAN - 1) / SPAN * SPAN; }

static inline ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static inline void *take(char **spare, ptrdiff_t bytes) {
    void *taken = *spare;
    *spare += (bytes + 63) / 64 * 64;
    return taken;
}

/* rows [padded(count)][size]: those of a sequence, then zeros */
static void copy_rows(struct states from, ptrdiff_t first, ptrdiff_t count, ptrdiff_t head, number *rows,
                      ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < count; i++)
        memcpy(rows + i * size, from.at + (first + i) * from.token + head * from.head, size * sizeof(number));
    memset(rows + count * size, 0, (padded(count) - count) * size * sizeof(number));
}

/* Columns of a product over the numbers of a head: tiles [tokens / SIDE][size / DEPTH], in which pairs of numbers
   of SIDE tokens lie side by side */
static void pack_across(const number *rows, uint32_t *tiles, ptrdiff_t tokens, ptrdiff_t size) {
    for (ptrdiff_t token = 0; token < tokens; token += SIDE)
        for (ptrdiff_t part = 0; part < size; part += DEPTH, tiles += SUM)
            for (ptrdiff_t j = 0; j < SIDE; j++) {
                uint32_t pairs[SIDE];
                memcpy(pairs, rows + (token + j) * size + part, sizeof pairs);
                for (ptrdiff_t pair = 0; pair < SIDE; pair++) tiles[pair * SIDE + j] = pairs[pair];
            }
}

/* Two rows of numbers side by side */
static inline words together(const number *even, const number *odd) {
    return (words)load(odd) | (words)load(even) >> 16;
}

/* Columns of a product over tokens: tiles [tokens / DEPTH][size / SIDE], in which pairs of tokens lie side by
   side */
static void pack_down(const number *rows, uint32_t *tiles, ptrdiff_t tokens, ptrdiff_t size) {
    for (ptrdiff_t token = 0; token < tokens; token += DEPTH)
        for (ptrdiff_t column = 0; column < size; column += SIDE)
            for (ptrdiff_t pair = 0; pair < SIDE; pair++, tiles += SIDE) {
                const number *even = rows + (token + 2 * pair) * size + column;
                *(words *)tiles = together(even, even + size);
            }
}

/* Rows of a product over tokens: tiles [size / SIDE][tokens / DEPTH] of the transposed rows */
static void transpose(const number *rows, number *tiles, ptrdiff_t tokens, ptrdiff_t size) {
    for (ptrdiff_t row = 0; row < size; row += SIDE)
        for (ptrdiff_t token = 0; token < tokens; token += DEPTH, tiles += TILE)
            for (ptrdiff_t j = 0; j < DEPTH; j++)
                for (ptrdiff_t i = 0; i < SIDE; i++) tiles[i * DEPTH + j] = rows[(token + j) * size + row + i];
}

/* out [SPAN][stride]: products of SPAN rows with SPAN columns over the numbers of a head */
static void multiply_across(const number *rows, const uint32_t *columns, float *out, ptrdiff_t stride,
                            ptrdiff_t size) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (ptrdiff_t part = 0; part < size / DEPTH; part++) {
        _tile_loadd(4, rows + part * DEPTH, size * sizeof(number));
        _tile_loadd(5, rows + SIDE * size + part * DEPTH, size * sizeof(number));
        _tile_loadd(6, columns + part * SUM, 64);
        _tile_loadd(7, columns + (size / DEPTH + part) * SUM, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, stride * sizeof(float));
    _tile_stored(1, out + SIDE, stride * sizeof(float));
    _tile_stored(2, out + SIDE * stride, stride * sizeof(float));
    _tile_stored(3, out + SIDE * stride + SIDE, stride * sizeof(float));
}

static inline void load_four(const float *sums, ptrdiff_t apart, ptrdiff_t stride) {
    _tile_loadd(0, sums, stride * sizeof(float));
    _tile_loadd(1, sums + apart, stride * sizeof(float));
    _tile_loadd(2, sums + 2 * apart, stride * sizeof(float));
    _tile_loadd(3, sums + 3 * apart, stride * sizeof(float));
}

static inline void store_four(float *sums, ptrdiff_t apart, ptrdiff_t stride) {
    _tile_stored(0, sums, stride * sizeof(float));
    _tile_stored(1, sums + apart, stride * sizeof(float));
    _tile_stored(2, sums + 2 * apart, stride * sizeof(float));
    _tile_stored(3, sums + 3 * apart, stride * sizeof(float));
}

/* out [SIDE][size] += weights [SIDE][stride] columns, over the tokens from `first` to `last` */
static void multiply_down(const number *weights, ptrdiff_t stride, const uint32_t *columns, float *out,
                          ptrdiff_t first, ptrdiff_t last, ptrdiff_t size) {
    for (ptrdiff_t column = 0; column < size; column += 4 * SIDE) {
        load_four(out + column, SIDE, size);
        for (ptrdiff_t token = first; token < last; token += DEPTH) {
            const uint32_t *tiles = columns + (token / DEPTH * (size / SIDE) + column / SIDE) * SUM;
            _tile_loadd(4, weights + token, stride * sizeof(number));
            _tile_loadd(5, tiles, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, tiles + SUM, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, tiles + 2 * SUM, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, tiles + 3 * SUM, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        store_four(out + column, SIDE, size);
    }
}

/* weights [count] = exp(scale scores - top) for the first `seen` scores, zeros behind them; returns
   log(sum(exp(scale scores))). The sum of the weights is in `total`. */
static float soften(const float *scores, number *weights, ptrdiff_t seen, ptrdiff_t count, float scale,
                    float *total) {
    vec tops = all(-INFINITY);
    for (ptrdiff_t i = 0; i < seen; i += LANES) {
        ints visible = lanes < (int32_t)(seen - i);
        vec part = *(const vec *)(scores + i);
        tops = larger((vec)(((ints)part & visible) | ((ints)all(-INFINITY) & ~visible)), tops);
    }
    float top = scale * largest_of(tops);
    vec sums = {0};
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        ints visible = lanes < (int32_t)(seen - i);
        vec weight = exponential(scale * *(const vec *)(scores + i) - top);
        weight = (vec)((ints)weight & visible);
        sums += weight;
        store(weights + i, weight);
    }
    *total = sum_of(sums);
    return top + logf(*total);
}

/* Queries of one head of a sequence: out and lse */
static void attend(const number *queries, const uint32_t *keys, const uint32_t *values, number *out,
                   ptrdiff_t out_token, float *lse, ptrdiff_t count, ptrdiff_t size, float scale, char *spare) {
    ptrdiff_t tokens = padded(count);
    float *scores = take(&spare, SPAN * tokens * sizeof(float));
    number *weights = take(&spare, SPAN * tokens * sizeof(number));
    float *sums = take(&spare, SIDE * size * sizeof(float));
    for (ptrdiff_t first = 0; first < tokens; first += SPAN) {
        ptrdiff_t seen = first + SPAN;
        float totals[SPAN];
        for (ptrdiff_t key = 0; key < seen; key += SPAN)
            multiply_across(queries + first * size, keys + key / SIDE * (size / DEPTH) * SUM, scores + key, tokens,
                            size);
        for (ptrdiff_t i = 0; i < SPAN; i++) {
            float normaliser =
                soften(scores + i * tokens, weights + i * tokens, first + i + 1, seen, scale, totals + i);
            if (first + i < count) lse[first + i] = normaliser;
        }
        for (ptrdiff_t tile = 0; tile < SPAN; tile += SIDE) {
            memset(sums, 0, SIDE * size * sizeof(float));
            multiply_down(weights + tile * tokens, tokens, values, sums, 0, seen, size);
            for (ptrdiff_t i = 0; i < smaller(count - first - tile, SIDE); i++)
                for (ptrdiff_t j = 0; j < size; j += LANES)
                    store(out + (first + tile + i) * out_token + j,
                          *(vec *)(sums + i * size + j) / totals[tile + i]);
        }
    }
}

/* out [tokens][heads][size] and lse [heads][total]. bounds [sequences + 1]; scratch: strop_attention_scratch bytes
   per thread */
void strop_attention(const number *q, const number *k, const number *v, const ptrdiff_t *distances,
                     const int32_t *bounds, number *out, float *lse, char *scratch, ptrdiff_t scratch_size,
                     ptrdiff_t sequences, ptrdiff_t heads, ptrdiff_t key_heads, ptrdiff_t size, float scale,
                     int threads) {
    extern int omp_get_thread_num(void);
    struct states queries = {q, distances[0], distances[1]};
    struct states keys = {k, distances[2], distances[3]};
    struct states values = {v, distances[4], distances[5]};
    ptrdiff_t total = bounds[sequences];
    ptrdiff_t group = heads / key_heads;
#pragma omp parallel num_threads(threads)
    {
        struct tile_settings found;
        begin_tiles(&found);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < sequences * key_heads; task++) {
            char *spare = scratch + omp_get_thread_num() * scratch_size;
            ptrdiff_t first = bounds[task / key_heads];
            ptrdiff_t count = bounds[task / key_heads + 1] - first;
            ptrdiff_t bytes = padded(count) * size * sizeof(number);
            number *rows = take(&spare, bytes);
            uint32_t *packed_keys = take(&spare, bytes);
            uint32_t *packed_values = take(&spare, bytes);
            copy_rows(keys, first, count, task % key_heads, rows, size);
            pack_across(rows, packed_keys, padded(count), size);
            copy_rows(values, first, count, task % key_heads, rows, size);
            pack_down(rows, packed_values, padded(count), size);
            for (ptrdiff_t head = task % key_heads * group; head < (task % key_heads + 1) * group; head++) {
                copy_rows(queries, first, count, head, rows, size);
                attend(rows, packed_keys, packed_values, out + (first * heads + head) * size, heads * size,
                       lse + head * total + first, count, size, scale, spare);
            }
        }
        end_tiles(&found);
    }
}

/* What backward needs of a query head of a sequence */
struct of_queries {
    uint32_t *across, *down;             /* queries */
    uint32_t *grad_across, *grad_down;   /* dO */
    float *lse, *dot;                    /* dot: D */
    float *grad;                         /* dQ^T [tokens / SIDE][size][SIDE] */
};

static void prepare_queries(struct states queries, struct states outs, struct states grads, const float *lse,
                            ptrdiff_t first, ptrdiff_t count, ptrdiff_t head, ptrdiff_t size,
                            struct of_queries found, number *rows, number *of_out) {
    ptrdiff_t tokens = padded(count);
    copy_rows(queries, first, count, head, rows, size);
    pack_across(rows, found.across, tokens, size);
    pack_down(rows, found.down, tokens, size);
    copy_rows(grads, first, count, head, rows, size);
    pack_across(rows, found.grad_across, tokens, size);
    pack_down(rows, found.grad_down, tokens, size);
    copy_rows(outs, first, count, head, of_out, size);
    for (ptrdiff_t i = 0; i < tokens; i++) {
        vec sums = {0};
        for (ptrdiff_t j = 0; j < size; j += LANES) sums += load(rows + i * size + j) * load(of_out + i * size + j);
        found.dot[i] = sum_of(sums);
        found.lse[i] = i < count ? lse[i] : INFINITY; /* p of padding is 0 */
    }
    memset(found.grad, 0, tokens * size * sizeof(float));
}

/* p^T and dS^T of SPAN keys with SPAN queries, of which `key` and `query` are the first, in rows of `stride`; dS^T
   also with pairs of keys side by side, in `pairs` [2][SUM] */
static void weigh(const float *scores, const float *slopes, struct of_queries of, ptrdiff_t key, ptrdiff_t query,
                  float scale, number *p, number *ds, ptrdiff_t stride, uint32_t *pairs) {
    for (ptrdiff_t tile = 0; tile < 2; tile++) {
        vec lse = *(vec *)(of.lse + query + tile * SIDE);
        vec dot = *(vec *)(of.dot + query + tile * SIDE);
        for (ptrdiff_t i = 0; i < SPAN; i++) {
            vec weight = exponential(scale * *(vec *)(scores + i * SPAN + tile * SIDE) - lse);
            if (key == query) weight = (vec)((ints)weight & (lanes >= (int32_t)(i - tile * SIDE)));
            vec slope = scale * weight * (*(vec *)(slopes + i * SPAN + tile * SIDE) - dot);
            store(p + i * stride + tile * SIDE, weight);
            store(ds + i * stride + tile * SIDE, slope);
            if (i % 2)
                *(words *)(pairs + tile * SUM + i / 2 * SIDE) = together(ds + (i - 1) * stride + tile * SIDE,
                                                                         ds + i * stride + tile * SIDE);
        }
    }
}

/* dQ^T of a tile of queries += k^T dS^T over the keys from `first` to `last`. pairs: those of these keys with all
   queries, [keys / SPAN][tokens / SIDE][SUM] */
static void add_query_grad(const number *transposed, const uint32_t *pairs, float *grad, ptrdiff_t query,
                           ptrdiff_t first, ptrdiff_t last, ptrdiff_t tokens, ptrdiff_t size) {
    for (ptrdiff_t row = 0; row < size; row += 4 * SIDE) {
        float *own = grad + query * size + row * SIDE;
        ptrdiff_t apart = tokens / DEPTH * TILE;
        load_four(own, SUM, SIDE);
        for (ptrdiff_t key = first; key < last; key += DEPTH) {
            const number *rows = transposed + row / SIDE * apart + key / DEPTH * TILE;
            _tile_loadd(7, pairs + ((key - first) / SPAN * (tokens / SIDE) + query / SIDE) * SUM, 64);
            _tile_loadd(4, rows, 64);
            _tile_dpbf16ps(0, 4, 7);
            _tile_loadd(5, rows + apart, 64);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(6, rows + 2 * apart, 64);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(4, rows + 3 * apart, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        store_four(own, SUM, SIDE);
    }
}

/* What one query head adds to the gradients of its keys and values [tokens][size], and its own */
static void attend_backward(const number *keys, const number *values, const number *transposed,
                            struct of_queries of, float *grad_keys, float *grad_values, ptrdiff_t tokens,
                            ptrdiff_t size, float scale, char *spare) {
    float *scores = take(&spare, SPAN * SPAN * sizeof(float));
    float *slopes = take(&spare, SPAN * SPAN * sizeof(float));
    number *p = take(&spare, KEYS * tokens * sizeof(number));
    number *ds = take(&spare, KEYS * tokens * sizeof(number));
    uint32_t *pairs = take(&spare, KEYS * tokens * sizeof(number));
    ptrdiff_t across = size / DEPTH * SUM;
    for (ptrdiff_t first = 0; first < tokens; first += KEYS) {
        ptrdiff_t last = smaller(first + KEYS, tokens);
        for (ptrdiff_t key = first; key < last; key += SPAN)
            for (ptrdiff_t query = key; query < tokens; query += SPAN) {
                multiply_across(keys + key * size, of.across + query / SIDE * across, scores, SPAN, size);
                multiply_across(values + key * size, of.grad_across + query / SIDE * across, slopes, SPAN, size);
                ptrdiff_t place = (key - first) * tokens + query;
                weigh(scores, slopes, of, key, query, scale, p + place, ds + place, tokens,
                      pairs + ((key - first) / SPAN * (tokens / SIDE) + query / SIDE) * SUM);
            }
        for (ptrdiff_t key = first; key < last; key += SIDE) {
            ptrdiff_t block = key / SPAN * SPAN;
            multiply_down(p + (key - first) * tokens, tokens, of.grad_down, grad_values + key * size, block, tokens,
                          size);
            multiply_down(ds + (key - first) * tokens, tokens, of.down, grad_keys + key * size, block, tokens, size);
        }
        for (ptrdiff_t query = first; query < tokens; query += SIDE)
            add_query_grad(transposed, pairs, of.grad, query, first, smaller(last, query / SPAN * SPAN + SPAN), tokens,
                           size);
    }
}

static void write_rows(const float *rows, number *to, ptrdiff_t distance, ptrdiff_t count, ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < count; i++)
        for (ptrdiff_t j = 0; j < size; j += LANES) store(to + i * distance + j, *(vec *)(rows + i * size + j));
}

/* The same from dQ^T */
static void write_turned(const float *turned, number *to, ptrdiff_t distance, ptrdiff_t count, ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const float *from = turned + i / SIDE * SIDE * size + i % SIDE;
        for (ptrdiff_t j = 0; j < size; j += LANES) {
            vec row;
            for (ptrdiff_t lane = 0; lane < LANES; lane++) row[lane] = from[(j + lane) * SIDE];
            store(to + i * distance + j, row);
        }
    }
}

/* Gradients [tokens][heads][size] of queries, keys and values, given that of out. distances: between tokens and
   heads of q, k, v, out and grad */
void strop_attention_backward(const number *q, const number *k, const number *v, const number *out,
                              const number *grad, const ptrdiff_t *distances, const int32_t *bounds,
                              const float *lse, number *grad_q, number *grad_k, number *grad_v, char *scratch,
                              ptrdiff_t scratch_size, ptrdiff_t sequences, ptrdiff_t heads, ptrdiff_t key_heads,
                              ptrdiff_t size, float scale, int threads) {
    extern int omp_get_thread_num(void);
    struct states queries = {q, distances[0], distances[1]};
    struct states keys = {k, distances[2], distances[3]};
    struct states values = {v, distances[4], distances[5]};
    struct states outs = {out, distances[6], distances[7]};
    struct states grads = {grad, distances[8], distances[9]};
    ptrdiff_t total = bounds[sequences];
    ptrdiff_t group = heads / key_heads;
#pragma omp parallel num_threads(threads)
    {
        struct tile_settings found;
        begin_tiles(&found);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < sequences * key_heads; task++) {
            char *spare = scratch + omp_get_thread_num() * scratch_size;
            ptrdiff_t first = bounds[task / key_heads];
            ptrdiff_t count = bounds[task / key_heads + 1] - first;
            ptrdiff_t tokens = padded(count);
            ptrdiff_t own = task % key_heads;
            ptrdiff_t bytes = tokens * size * sizeof(number);
            number *rows[5];
            for (int i = 0; i < 5; i++) rows[i] = take(&spare, bytes);
            float *sums[3];
            for (int i = 0; i < 3; i++) sums[i] = take(&spare, 2 * bytes);
            struct of_queries of = {take(&spare, bytes), take(&spare, bytes), take(&spare, bytes), take(&spare, bytes)};
            of.lse = take(&spare, tokens * sizeof(float));
            of.dot = take(&spare, tokens * sizeof(float));
            of.grad = sums[2];
            copy_rows(keys, first, count, own, rows[0], size);
            copy_rows(values, first, count, own, rows[1], size);
            transpose(rows[0], rows[2], tokens, size);
            memset(sums[0], 0, 2 * bytes);
            memset(sums[1], 0, 2 * bytes);
            for (ptrdiff_t head = own * group; head < (own + 1) * group; head++) {
                prepare_queries(queries, outs, grads, lse + head * total + first, first, count, head, size, of, rows[3],
                                rows[4]);
                attend_backward(rows[0], rows[1], rows[2], of, sums[0], sums[1], tokens, size, scale, spare);
                write_turned(of.grad, grad_q + (first * heads + head) * size, heads * size, count, size);
            }
            write_rows(sums[0], grad_k + (first * key_heads + own) * size, key_heads * size, count, size);
            write_rows(sums[1], grad_v + (first * key_heads + own) * size, key_heads * size, count, size);
        }
        end_tiles(&found);
    }
}

/* Bytes that a thread needs for sequences of this many tokens */
ptrdiff_t strop_attention_scratch(ptrdiff_t longest, ptrdiff_t size) {
    ptrdiff_t tokens = padded(longest);
    ptrdiff_t places = 32 * 64; /* of alignment */
    return tokens * size * 30 + tokens * (8 + 3 * KEYS * 2 + SPAN * 6) + SIDE * size * 4 + 2 * SPAN * SPAN * 4 + places;
}
