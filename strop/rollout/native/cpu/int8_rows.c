/* Linear layers in int8, for CPUs with AVX-512 VNNI or the dot products of NEON.

   Weights have one scale per output and rows one scale each. A sum of int8 products is exact in 32 bits, so a
   result depends neither on the order of the sum nor on other rows. Weights are packed in panels of WIDTH
   outputs, where a word has four inputs of one output: one instruction multiplies four numbers and adds the
   products. While a part of a panel (DEPTH words of each output) is in the L1 cache, all rows are multiplied
   with it, in groups of 8 rows. Meanwhile every group fetches its share of the next part.

   VNNI multiplies numbers without a sign by numbers with one, so weights are stored plus 128. What that adds
   to a sum, 128 times the sum of the row, is subtracted at the end.

   A LoRA adapter is added in the same call, in float32: low = x A^T is computed before the panels, from rows
   that are not rounded. Its rank is filled up with zeros to a multiple of CHUNK. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) /* 32 registers of 4 words */
#include <arm_neon.h>
#define LANES 4
#define VECTORS 3
#define OFFSET 0
#define LEVEL 3 /* fetch into the L1 cache */
typedef int32x4_t ints;
typedef int8x16_t bytes;
typedef bytes states;
#define STATES 2
#define LOAD_STATES(from, i) vld1q_s8((const int8_t *)((from) + 4 * (i)))
#define DOT(sums, weights, rows, r) vdotq_laneq_s32(sums, weights, (rows)[(r) / 4], (r) % 4)
#else /* 32 registers of 16 words */
#include <immintrin.h>
#define LANES 16
#define VECTORS 2
#define OFFSET 128
#define LEVEL 2 /* fetch into the L2 cache */
typedef int32_t ints __attribute__((vector_size(64)));
typedef ints bytes;
typedef ints states;
#define STATES 8
#define LOAD_STATES(from, i) ((ints)_mm512_set1_epi32((from)[i]))
#define DOT(sums, weights, rows, r)                                                                          \
    (ints) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(weights), (__m512i)(rows)[r])
#endif

#ifdef BF16
typedef uint16_t number;
#else
typedef float number;
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float chunk __attribute__((vector_size(64), aligned(4)));

enum {
    WIDTH = LANES * VECTORS, /* outputs of a panel */
    GROUP = 8,               /* rows of a group */
    FOUR = 4,                /* values in a word */
    CHUNK = 16,              /* numbers of a chunk */
    DEPTH = 128,             /* words that are summed at a time */
    BLOCK = 256,             /* rows for which the weights are read once */
    LINE = 64,               /* bytes of a cache line */
};

extern int omp_get_thread_num(void);

static inline float widen(number x) {
#ifdef BF16
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
#else
    return x;
#endif
}

/* The nearest number, of two the even one. NaN stays NaN. */
static inline number nearest(float x) {
#ifdef BF16
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    return x;
#endif
}

/* What the values of a row are divided by to be between -127 and 127. NaN if one of them is not finite */
static inline float scale_of(const number *row, ptrdiff_t size) {
    int32_t most = 0; /* without their signs, bits are in the order of the numbers */
    for (ptrdiff_t i = 0; i < size; i++) {
        float x = widen(row[i]);
        int32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    if (most >= 0x7f800000) return NAN;
    float scale = largest / 127;
    return scale < 1e-12f ? 1e-12f : scale;
}

/* Zeros for a row with a NaN or an infinity: its scale is NaN */
static inline void shorten(const number *row, int8_t *values, ptrdiff_t size, float scale) {
    if (scale != scale) {
        memset(values, 0, size);
        return;
    }
    for (ptrdiff_t i = 0; i < size; i++) {
        float x = widen(row[i]) / scale + 0.5f;
        int32_t whole = (int32_t)x;
        values[i] = (int8_t)(whole - (whole > x)); /* floor: its function is not vectorized */
    }
}

/* Outputs of a panel */
int strop_width(void) { return WIDTH; }

/* The rank of an adapter is a multiple of this */
int strop_chunk(void) { return CHUNK; }

/* Words of the scratch memory of a product of so many rows */
ptrdiff_t strop_scratch_size(ptrdiff_t rows, ptrdiff_t ins, ptrdiff_t rank, int threads) {
    ptrdiff_t grouped = (rows + GROUP - 1) / GROUP * GROUP;
    return grouped * (ins / FOUR + 2 + rank) + threads * (ins / FOUR);
}

/* w [outs][ins] -> the outputs from `first` on of packed [panels][ins / 4][WIDTH], and their scales. ins: a
   multiple of 4. scratch: ins numbers per thread */
void strop_pack(const number *w, uint32_t *packed, float *scales, int8_t *scratch, ptrdiff_t first,
                ptrdiff_t outs, ptrdiff_t ins, int threads) {
    ptrdiff_t end = first + outs;
    ptrdiff_t words = ins / FOUR;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t panel = first / WIDTH; panel < (end + WIDTH - 1) / WIDTH; panel++) {
        int8_t *values = scratch + omp_get_thread_num() * ins;
        for (ptrdiff_t j = 0; j < WIDTH; j++) {
            ptrdiff_t out = panel * WIDTH + j;
            if (out < first || out >= end) continue;
            const number *row = w + (out - first) * ins;
            scales[out] = scale_of(row, ins);
            shorten(row, values, ins, scales[out]);
            for (ptrdiff_t k = 0; k < words; k++) {
                uint32_t word;
                memcpy(&word, values + k * FOUR, FOUR);
                packed[(panel * words + k) * WIDTH + j] = OFFSET ? word ^ 0x80808080 : word;
            }
        }
    }
}

/* Rows x [rows][ins], words of a group side by side: grouped [groups][ins / 4][GROUP]; their scales, and what
   OFFSET adds to their sums */
static void group_rows(const number *x, uint32_t *grouped, float *scales, int32_t *added, int8_t *values,
                       ptrdiff_t rows, ptrdiff_t ins) {
    ptrdiff_t words = ins / FOUR;
#pragma omp for schedule(static)
    for (ptrdiff_t m = 0; m < (rows + GROUP - 1) / GROUP * GROUP; m++) {
        scales[m] = m < rows ? scale_of(x + m * ins, ins) : NAN;
        shorten(x + m * ins, values, ins, scales[m]);
        int32_t sum = 0;
        for (ptrdiff_t k = 0; k < ins; k++) sum += values[k];
        added[m] = OFFSET * sum;
        uint32_t *to = grouped + m / GROUP * GROUP * words + m % GROUP;
        for (ptrdiff_t k = 0; k < words; k++) memcpy(to + k * GROUP, values + k * FOUR, FOUR);
    }
}

/* low [groups * GROUP][rank] = x A^T, with a = A^T [ins][rank]. Rows behind the last are copies of it. */
static void multiply_low(const number *x, const float *a, float *low, ptrdiff_t rows, ptrdiff_t ins,
                         ptrdiff_t rank) {
#pragma omp for schedule(static) collapse(2)
    for (ptrdiff_t m = 0; m < rows; m += GROUP)
        for (ptrdiff_t r = 0; r < rank; r += CHUNK) {
            const number *row[GROUP];
            chunk sums[GROUP];
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i++) {
                row[i] = x + (m + i < rows ? m + i : rows - 1) * ins;
                sums[i] = (chunk){0};
            }
            for (ptrdiff_t k = 0; k < ins; k++) {
                chunk weights = *(const chunk *)(a + k * rank + r);
#pragma GCC unroll 8
                for (int i = 0; i < GROUP; i++) sums[i] += weights * widen(row[i][k]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i++) *(chunk *)(low + (m + i) * rank + r) = sums[i];
        }
}

/* sums [GROUP][WIDTH] = low [GROUP][rank] b [rank][WIDTH] */
static void multiply_high(const float *low, const float *b, float *sums, ptrdiff_t rank) {
    vec parts[GROUP][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) parts[i][v] = (vec){0};
    for (ptrdiff_t r = 0; r < rank; r++) {
        vec weights[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) weights[v] = *(const vec *)(b + r * WIDTH + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) parts[i][v] += weights[v] * low[i * rank + r];
    }
#pragma GCC unroll 8
    for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) *(vec *)(sums + i * WIDTH + v * LANES) = parts[i][v];
}

/* total[rows][WIDTH] += x[depth][GROUP]^T w[depth][WIDTH], in words. With each word of inputs, `lines` cache
   lines are fetched from `next`, which moves by `step` bytes. */
static inline __attribute__((always_inline)) void add_part(int rows, int lines, const uint32_t *x,
                                                           const uint32_t *w, ptrdiff_t depth, int32_t *total,
                                                           const char *next, ptrdiff_t step) {
    ints sums[GROUP][VECTORS]; /* all loops over it are unrolled, so that it stays in registers */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) memcpy(&sums[r][v], total + r * WIDTH + v * LANES, sizeof(ints));
    for (ptrdiff_t k = 0; k < depth; k++) {
        bytes weights[VECTORS];
        states group[STATES];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) memcpy(&weights[v], w + k * WIDTH + v * LANES, sizeof(bytes));
#pragma GCC unroll 8
        for (int i = 0; i < (rows * STATES + GROUP - 1) / GROUP; i++) group[i] = LOAD_STATES(x + k * GROUP, i);
#pragma GCC unroll 2
        for (int line = 0; line < lines; line++) __builtin_prefetch(next + k * step + line * LINE, 0, LEVEL);
#define ADD(r)                                                                                               \
    if (r < rows) _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; v++) sums[r][v] =                     \
        DOT(sums[r][v], weights[v], group, r);
        ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7)
#undef ADD
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) memcpy(total + r * WIDTH + v * LANES, &sums[r][v], sizeof(ints));
}

typedef void part_function(const uint32_t *, const uint32_t *, ptrdiff_t, int32_t *, const char *, ptrdiff_t);

#define PART(name, rows, lines)                                                                              \
    static __attribute__((noinline)) void name(const uint32_t *x, const uint32_t *w, ptrdiff_t depth,        \
                                               int32_t *total, const char *next, ptrdiff_t step) {           \
        add_part(rows, lines, x, w, depth, total, next, step);                                               \
    }
PART(four_rows, 4, 0)
PART(four_rows_1, 4, 1)
PART(four_rows_2, 4, 2)
PART(eight_rows, 8, 0)
PART(eight_rows_1, 8, 1)
PART(eight_rows_2, 8, 2)

static inline part_function *part_of(ptrdiff_t rows, ptrdiff_t lines) {
    static part_function *const parts[2][3] = {{four_rows, four_rows_1, four_rows_2},
                                               {eight_rows, eight_rows_1, eight_rows_2}};
    return parts[rows > 4][lines];
}

/* y [rows][outs] = x W^T + bias + low B^T, with W packed, a = A^T [ins][rank], b: B^T times the scale of the
   adapter, as [panels][rank][WIDTH]. bias may be NULL; rank 0: no adapter. scratch: strop_scratch_size */
void strop_linear(const number *x, uint32_t *scratch, const uint32_t *packed, const float *scales,
                  const number *bias, const float *a, const float *b, ptrdiff_t rank, number *y,
                  ptrdiff_t rows, ptrdiff_t ins, ptrdiff_t outs, int threads) {
    ptrdiff_t words = ins / FOUR;
    ptrdiff_t all_groups = (rows + GROUP - 1) / GROUP;
    ptrdiff_t panels = (outs + WIDTH - 1) / WIDTH;
    float *row_scales = (float *)(scratch + all_groups * GROUP * words);
    int32_t *added = (int32_t *)row_scales + all_groups * GROUP;
    float *low = (float *)(added + all_groups * GROUP);
    int8_t *values = (int8_t *)(low + all_groups * GROUP * rank);
#pragma omp parallel num_threads(threads)
    {
        group_rows(x, scratch, row_scales, added, values + omp_get_thread_num() * ins, rows, ins);
        if (rank) multiply_low(x, a, low, rows, ins, rank);
        int32_t total[BLOCK * WIDTH] __attribute__((aligned(64)));
        float adapter[GROUP * WIDTH] __attribute__((aligned(64))) = {0};
        for (ptrdiff_t begin = 0; begin < rows; begin += BLOCK) {
            ptrdiff_t count = rows - begin < BLOCK ? rows - begin : BLOCK;
            ptrdiff_t groups = (count + GROUP - 1) / GROUP;
            ptrdiff_t step = (WIDTH * FOUR + groups - 1) / groups;
            ptrdiff_t lines = (step + LINE - 1) / LINE;
#pragma omp for schedule(static) nowait
            for (ptrdiff_t panel = 0; panel < panels; panel++) {
                memset(total, 0, groups * GROUP * WIDTH * sizeof *total);
                for (ptrdiff_t k = 0; k < words; k += DEPTH) {
                    ptrdiff_t depth = words - k < DEPTH ? words - k : DEPTH;
                    const uint32_t *part = packed + (panel * words + k) * WIDTH;
                    const char *next = (const char *)(part + DEPTH * WIDTH);
                    for (ptrdiff_t g = 0; g < groups; g++)
                        part_of(count - g * GROUP, lines)(
                            scratch + ((begin / GROUP + g) * words + k) * GROUP, part, depth,
                            total + g * GROUP * WIDTH, next + g * depth * step, step);
                }
                ptrdiff_t out = panel * WIDTH;
                ptrdiff_t here = outs - out < WIDTH ? outs - out : WIDTH;
                for (ptrdiff_t m = 0; m < count; m++) {
                    ptrdiff_t row = begin + m;
                    if (rank && m % GROUP == 0)
                        multiply_high(low + row * rank, b + out * rank, adapter, rank);
                    for (ptrdiff_t j = 0; j < here; j++) {
                        int32_t sum = total[m * WIDTH + j] - added[row];
                        float scaled = (float)sum * row_scales[row] * scales[out + j];
                        float other = (bias ? widen(bias[out + j]) : 0) + adapter[m % GROUP * WIDTH + j];
                        y[row * outs + out + j] = nearest(scaled + other);
                    }
                }
            }
        }
    }
}
