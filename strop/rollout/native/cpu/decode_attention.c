/* Attention of one new token per row over its cached keys and values, for CPUs with AVX-512.

   A decode step reads the keys and values of all rows once and computes little with each number, so it takes
   as long as memory does. Query heads that share a key head are computed together: a block of LANES keys is
   read once, while it is in the L1 cache each query head is multiplied with it. Scores of the whole context
   are kept; values are weighted in a second pass. Blocks in bf16 are widened once for all heads; with AMX a
   block of keys is a tile as it is, and is multiplied with up to 16 heads at once. The sums of a row are in the
   order of its positions, so a result does not depend on other rows or on the number of threads. */

#include "vectors.h"

#ifdef __AMX_BF16__
#include "tiles.h"
#endif

#include <string.h>

extern int omp_get_thread_num(void);

enum {
    SUMS = 4,            /* vectors of sums of the second pass */
    PART = SUMS * LANES, /* numbers of a value that are summed at a time; head sizes are multiples of it */
    AHEAD = 2,           /* blocks of LANES positions between the one in use and the one that is fetched */
    MOST_SIZE = 256,     /* of a head */
};

static const ints EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
static const ints ODD = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

/* The sum of each of LANES vectors. Neighbours are added until one vector is left. */
static inline __attribute__((always_inline)) vec sums_of(vec *parts) {
#pragma GCC unroll 4
    for (int count = LANES; count > 1; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count / 2; i++)
            parts[i] = __builtin_shuffle(parts[2 * i], parts[2 * i + 1], EVEN) +
                       __builtin_shuffle(parts[2 * i], parts[2 * i + 1], ODD);
    return parts[0];
}

/* scores[j] = query . keys[j] for LANES keys */
static inline __attribute__((always_inline)) vec products(const float *query, const float *keys,
                                                          ptrdiff_t size) {
    vec parts[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) parts[j] = (vec){0};
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        vec q = *(const vec *)(query + i);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) parts[j] += q * *(const vec *)(keys + j * size + i);
    }
    return sums_of(parts);
}

/* total[size] += sum over j of weights[j] values[j], which is computed first */
static inline void add_values(const float *weights, const float *values, ptrdiff_t count, ptrdiff_t size,
                              float *total) {
    for (ptrdiff_t from = 0; from < size; from += PART) {
        vec sums[SUMS];
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) sums[v] = (vec){0};
        for (ptrdiff_t j = 0; j < count; j++)
#pragma GCC unroll 4
            for (int v = 0; v < SUMS; v++)
                sums[v] += *(const vec *)(values + j * size + from + v * LANES) * weights[j];
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) *(vec *)(total + from + v * LANES) += sums[v];
    }
}

/* A share of the numbers that are needed soon, [count] from `next` on, comes into the cache. */
static inline void fetch(const number *next, ptrdiff_t count, ptrdiff_t share, ptrdiff_t shares) {
    enum { LINE = 64 / sizeof(number) /* numbers of a cache line */ };
    for (ptrdiff_t i = count * share / shares / LINE; i < count * (share + 1) / shares / LINE; i++)
        __builtin_prefetch(next + i * LINE);
}

/* `count` numbers, a multiple of LANES, in float32: as they are, or widened into `wide` */
static inline const float *in_float(const number *from, float *wide, ptrdiff_t count) {
#ifdef BF16
    for (ptrdiff_t i = 0; i < count; i += LANES) *(vec *)(wide + i) = load(from + i);
    return wide;
#else
    return from;
#endif
}

#ifdef __AMX_BF16__

/* Columns of tiles: query [heads][size] of at most SIDE heads, zeros for the others */
static void pack_query(const number *query, ptrdiff_t heads, ptrdiff_t size, number *tiles) {
    memset(tiles, 0, size * SIDE * sizeof(number));
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t i = 0; i < size; i += 2)
            memcpy(tiles + i * SIDE + 2 * h, query + h * size + i, 2 * sizeof(number));
}

/* scores[h][j] = query . keys[j] * scale for LANES keys and all heads. `width`: between two heads */
static inline void multiply_tiles(const number *query, const number *keys, ptrdiff_t heads, ptrdiff_t size,
                                  float scale, float *scores, ptrdiff_t width) {
    float sums[LANES * SIDE] __attribute__((aligned(64)));
    _tile_zero(0);
    for (ptrdiff_t i = 0; i < size; i += DEPTH) {
        _tile_loadd(1, keys + i, size * sizeof(number));
        _tile_loadd(2, query + i * SIDE, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sums, 64);
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t j = 0; j < LANES; j++) scores[h * width + j] = sums[j * SIDE + h] * scale;
}

#endif

/* scores [count], a multiple of LANES, become exp(scores - their maximum); returns the sum */
static float weigh(float *scores, ptrdiff_t count) {
    vec tops = *(vec *)scores;
    for (ptrdiff_t j = LANES; j < count; j += LANES) tops = larger(*(vec *)(scores + j), tops);
    float top = largest_of(tops);
    vec total = {0};
    for (ptrdiff_t j = 0; j < count; j += LANES) {
        vec weights = exponential(*(vec *)(scores + j) - top);
        *(vec *)(scores + j) = weights;
        total += weights;
    }
    return sum_of(total);
}

/* out [heads][size]: attention of query [heads][size] over the keys and values [count][size] of one key
   head. scores: heads * (count rounded up to LANES) */
static void attend(const number *query, const number *keys, const number *values, number *out, float *scores,
                   ptrdiff_t heads, ptrdiff_t count, ptrdiff_t size, float scale) {
    ptrdiff_t whole = count / LANES * LANES;
    ptrdiff_t width = (count + LANES - 1) / LANES * LANES;
    number last[LANES * MOST_SIZE] __attribute__((aligned(64)));
    float wide[LANES * MOST_SIZE] __attribute__((aligned(64)));
    float wide_query[heads * size];
    float total[heads * size];
    float sums[heads];
    const float *queries = in_float(query, wide_query, heads * size);
#ifdef __AMX_BF16__
    number query_tiles[MOST_SIZE * SIDE] __attribute__((aligned(64)));
    if (heads <= SIDE) pack_query(query, heads, size, query_tiles);
#endif
    for (ptrdiff_t j = 0; j < width; j += LANES) {
        const number *block = keys + j * size;
        ptrdiff_t later = j + AHEAD * LANES;
        const number *next = later < width ? keys + later * size : values + (later - width) * size;
        if (j == whole) { /* the rest of the block is not read: other rows, or no memory, may follow */
            for (ptrdiff_t i = 0; i < LANES * size; i++) last[i] = i < (count - j) * size ? block[i] : 0;
            block = last;
        }
#ifdef __AMX_BF16__
        if (heads <= SIDE) {
            fetch(next, LANES * size, 0, 1);
            multiply_tiles(query_tiles, block, heads, size, scale, scores + j, width);
            continue;
        }
#endif
        const float *all_keys = in_float(block, wide, LANES * size);
        for (ptrdiff_t h = 0; h < heads; h++) {
            fetch(next, LANES * size, h, heads);
            *(vec *)(scores + h * width + j) = products(queries + h * size, all_keys, size) * scale;
        }
    }
    for (ptrdiff_t h = 0; h < heads; h++) {
        for (ptrdiff_t j = count; j < width; j++) scores[h * width + j] = -INFINITY;
        sums[h] = weigh(scores + h * width, width);
        for (ptrdiff_t i = 0; i < size; i++) total[h * size + i] = 0;
    }
    for (ptrdiff_t j = 0; j < count; j += LANES) {
        ptrdiff_t in_block = count - j < LANES ? count - j : LANES;
        const float *all_values = in_float(values + j * size, wide, in_block * size);
        for (ptrdiff_t h = 0; h < heads; h++) {
            fetch(values + (j + AHEAD * LANES) * size, LANES * size, h, heads);
            add_values(scores + h * width + j, all_values, in_block, size, total + h * size);
        }
    }
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t i = 0; i < size; i += LANES)
            store(out + h * size + i, *(vec *)(total + h * size + i) / sums[h]);
}

/* query and out [rows][key_heads][heads][size]; keys and values [places][key_heads][capacity][size]. Row r
   reads the positions up to positions[r] of place places[r], or only the last `window` of them if it is above 0.
   new_keys and new_values [rows][key_heads][size] are written at these positions before; NULL: they are there.
   scores: threads * heads * (the longest context, rounded up to LANES) */
void strop_decode_attention(const number *query, const number *new_keys, const number *new_values, number *keys,
                            number *values, const int64_t *places, const int64_t *positions, number *out,
                            float *scores, ptrdiff_t rows, ptrdiff_t key_heads, ptrdiff_t heads,
                            ptrdiff_t size, ptrdiff_t capacity, ptrdiff_t window, float scale,
                            ptrdiff_t scores_per_thread, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *own = scores + omp_get_thread_num() * scores_per_thread;
#ifdef __AMX_BF16__
        struct tile_settings found;
        begin_tiles(&found);
#endif
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < rows * key_heads; task++) {
            ptrdiff_t row = task / key_heads;
            ptrdiff_t end = positions[row] + 1;
            ptrdiff_t begin = window > 0 && end > window ? end - window : 0;
            ptrdiff_t start = (places[row] * key_heads + task % key_heads) * capacity;
            if (new_keys) {
                ptrdiff_t newest = (start + end - 1) * size;
                memcpy(keys + newest, new_keys + task * size, size * sizeof(number));
                memcpy(values + newest, new_values + task * size, size * sizeof(number));
            }
            ptrdiff_t from = (start + begin) * size;
            attend(query + task * heads * size, keys + from, values + from, out + task * heads * size, own,
                   heads, end - begin, size, scale);
        }
#ifdef __AMX_BF16__
        end_tiles(&found);
#endif
    }
}
