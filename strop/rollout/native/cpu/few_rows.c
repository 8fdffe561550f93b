/* Linear layers of few rows in float32, for CPUs with AVX-512 or NEON.

   A decode step reads all weights and computes little with each, so a product must read memory without a
   pause. Weights are packed in panels of WIDTH outputs: a panel has the weights of one input side by side,
   and is read once, in order. While a part of it (DEPTH inputs) is in the L1 cache, all rows are multiplied
   with it, in groups of 8 rows: 8 x VECTORS vectors of sums are in registers. Meanwhile the next part is
   fetched: with AVX-512 every group fetches its share of it, so that memory is read all the time. Sums of
   DEPTH inputs are added to the total in order, so a result does not depend on the number of threads or of
   rows.

   Weights that are exact in bf16, as most published ones are, may be packed in 16 bits: half the memory is
   read, and a part is widened once for all groups. The sums have the same bits.

   A LoRA adapter is added in the same call: low = x A^T is computed before the panels, and B^T times the
   scale is one more part of each panel. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) /* 32 registers of 4 numbers */
#define LANES 4
#define VECTORS 3
#define INPUTS 128
#define FETCHING_GROUPS(groups) 1
#define LEVEL 3 /* fetch into the L1 cache */
#define FIRST ((lanes){0, 4, 1, 5})
#define SECOND ((lanes){2, 6, 3, 7})
#else           /* 32 registers of 16 numbers */
#define LANES 16
#define VECTORS 2
#define INPUTS 64
#define FETCHING_GROUPS(groups) (groups)
#define LEVEL 2 /* fetch into the L2 cache */
#define FIRST ((lanes){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23})
#define SECOND ((lanes){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int lanes __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16), aligned(4)));
typedef float group_vec __attribute__((vector_size(32), aligned(4)));

enum {
    WIDTH = LANES * VECTORS, /* outputs of a panel */
    GROUP = 8,               /* rows of a group */
    DEPTH = INPUTS,          /* inputs that are summed at a time */
    AHEAD = 1024,            /* weights between those in use and those that one group fetches */
    LINE = 64,               /* bytes of a cache line */
    MOST_ROWS = 512,
    MOST_RANK = 256,
};

/* total[rows][WIDTH] += x[depth][GROUP]^T w[depth][WIDTH]. With each input, `lines` cache lines are fetched
   from `next`, which moves by `step` bytes. */
static inline __attribute__((always_inline)) void add_part(int rows, int lines, const float *x,
                                                           const float *w, ptrdiff_t depth, float *total,
                                                           const char *next, ptrdiff_t step) {
    vec sums[GROUP][VECTORS]; /* all loops over it are unrolled, so that it stays in registers */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = (vec){0};
    for (ptrdiff_t k = 0; k < depth; k++) {
        vec weights[VECTORS];
        /* as vectors: NEON multiplies with a lane of one */
        quad states[2] = {*(const quad *)(x + k * GROUP), *(const quad *)(x + k * GROUP + 4)};
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) weights[v] = *(const vec *)(w + k * WIDTH + v * LANES);
#pragma GCC unroll 2
        for (int line = 0; line < lines; line++) __builtin_prefetch(next + k * step + line * LINE, 0, LEVEL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float state = states[r / 4][r % 4];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * state;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) *(vec *)(total + r * WIDTH + v * LANES) += sums[r][v];
}

typedef void part_function(const float *, const float *, ptrdiff_t, float *, const char *, ptrdiff_t);

#define PART(name, rows, lines)                                                                              \
    static __attribute__((noinline)) void name(const float *x, const float *w, ptrdiff_t depth,              \
                                               float *total, const char *next, ptrdiff_t step) {             \
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

/* Outputs of a panel */
int strop_width(void) { return WIDTH; }

/* Rows become columns: in each stage, rows of the first and the second half are interleaved. */
static inline __attribute__((always_inline)) void transpose(vec *rows) {
    vec next[LANES];
#pragma GCC unroll 4
    for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], FIRST);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], SECOND);
        }
        memcpy(rows, next, sizeof next);
    }
}

static inline void narrow(const float *from, uint16_t *to, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        to[i] = bits >> 16;
    }
}

static inline void widen(const uint16_t *from, float *to, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* WIDTH rows of w, of which `left` are there, and `count` inputs from input k on -> to [count][WIDTH]; the
   other rows are zeros */
static inline void pack_part(const float *from, float *to, ptrdiff_t left, ptrdiff_t ins, ptrdiff_t count) {
    ptrdiff_t whole = count / LANES * LANES;
    for (ptrdiff_t k = 0; k < whole; k += LANES)
        for (int j = 0; j < WIDTH; j += LANES) {
            vec rows[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                rows[r] = j + r < left ? *(const vec *)(from + (j + r) * ins + k) : (vec){0};
            transpose(rows);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) *(vec *)(to + (k + r) * WIDTH + j) = rows[r];
        }
    for (ptrdiff_t k = whole; k < count; k++)
        for (int j = 0; j < WIDTH; j++) to[k * WIDTH + j] = j < left ? from[j * ins + k] : 0;
}

/* w [outs][ins] -> packed [panels][ins][WIDTH] in 16 or 32 bits, the last panel filled with zeros */
void strop_pack(const float *w, void *packed, ptrdiff_t outs, ptrdiff_t ins, int short_weights, int threads) {
    ptrdiff_t panels = (outs + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        const float *from = w + panel * WIDTH * ins;
        ptrdiff_t left = outs - panel * WIDTH;
        float part[DEPTH * WIDTH] __attribute__((aligned(64)));
        for (ptrdiff_t k = 0; k < ins; k += DEPTH) {
            ptrdiff_t depth = ins - k < DEPTH ? ins - k : DEPTH;
            ptrdiff_t at = (panel * ins + k) * WIDTH;
            pack_part(from + k, short_weights ? part : (float *)packed + at, left, ins, depth);
            if (short_weights) narrow(part, (uint16_t *)packed + at, depth * WIDTH);
        }
    }
}

/* Rows x [rows][ins], a group side by side for each input: grouped [groups][ins][GROUP] */
static void group_rows(const float *x, float *grouped, ptrdiff_t rows, ptrdiff_t ins) {
    ptrdiff_t groups = (rows + GROUP - 1) / GROUP;
#pragma omp for schedule(static) collapse(2)
    for (ptrdiff_t g = 0; g < groups; g++)
        for (ptrdiff_t from = 0; from < ins; from += DEPTH) {
            ptrdiff_t end = from + DEPTH < ins ? from + DEPTH : ins;
            for (int r = 0; r < GROUP; r++) {
                const float *row = x + (g * GROUP + r) * ins;
                int is_row = g * GROUP + r < rows;
                for (ptrdiff_t k = from; k < end; k++)
                    grouped[(g * ins + k) * GROUP + r] = is_row ? row[k] : 0;
            }
        }
}

/* low [groups][rank][GROUP] = grouped rows times a [rank][ins] */
static void multiply_low(const float *grouped, const float *a, float *low, ptrdiff_t groups, ptrdiff_t ins,
                         ptrdiff_t rank) {
#pragma omp for schedule(static) collapse(2)
    for (ptrdiff_t g = 0; g < groups; g++)
        for (ptrdiff_t from = 0; from < rank; from += 4) {
            const float *x = grouped + g * ins * GROUP;
            int count = rank - from < 4 ? rank - from : 4;
            group_vec total[4] = {{0}};
            for (ptrdiff_t begin = 0; begin < ins; begin += DEPTH) {
                ptrdiff_t end = begin + DEPTH < ins ? begin + DEPTH : ins;
                group_vec sums[4] = {{0}};
                if (count == 4) {
                    const float *row = a + from * ins;
                    for (ptrdiff_t k = begin; k < end; k++) {
                        group_vec state = *(const group_vec *)(x + k * GROUP);
#pragma GCC unroll 4
                        for (int r = 0; r < 4; r++) sums[r] += state * row[r * ins + k];
                    }
                } else {
                    for (int r = 0; r < count; r++)
                        for (ptrdiff_t k = begin; k < end; k++)
                            sums[r] += *(const group_vec *)(x + k * GROUP) * a[(from + r) * ins + k];
                }
                for (int r = 0; r < count; r++) total[r] += sums[r];
            }
            for (int r = 0; r < count; r++) *(group_vec *)(low + (g * rank + from + r) * GROUP) = total[r];
        }
}

/* y [rows][outs] = x W^T + bias + scale (x A^T) B^T, with W packed, A [rank][ins] and B [outs][rank].
   bias may be NULL; rank 0: no adapter. scratch: (ins + rank) * rows, rows rounded up to groups. */
void strop_linear(const float *x, float *scratch, const void *packed, int short_weights, const float *bias,
                  const float *a, const float *b, float scale, ptrdiff_t rank, float *y, ptrdiff_t rows,
                  ptrdiff_t ins, ptrdiff_t outs, int threads) {
    ptrdiff_t groups = (rows + GROUP - 1) / GROUP;
    ptrdiff_t panels = (outs + WIDTH - 1) / WIDTH;
    float *low = scratch + groups * GROUP * ins;
    ptrdiff_t size = short_weights ? sizeof(uint16_t) : sizeof(float);
    ptrdiff_t fetching = FETCHING_GROUPS(groups);
    ptrdiff_t step = (WIDTH * size + fetching - 1) / fetching;
    ptrdiff_t lines = (step + LINE - 1) / LINE;
    ptrdiff_t ahead = (fetching == 1 ? AHEAD : DEPTH * WIDTH) * size;
#pragma omp parallel num_threads(threads)
    {
        group_rows(x, scratch, rows, ins);
        if (rank) multiply_low(scratch, a, low, groups, ins, rank);
        float total[MOST_ROWS * WIDTH] __attribute__((aligned(64)));
        float adapter[MOST_RANK * WIDTH] __attribute__((aligned(64)));
        float wide[DEPTH * WIDTH] __attribute__((aligned(64)));
#pragma omp for schedule(static)
        for (ptrdiff_t panel = 0; panel < panels; panel++) {
            ptrdiff_t out = panel * WIDTH;
            ptrdiff_t count = outs - out < WIDTH ? outs - out : WIDTH;
            memset(total, 0, groups * GROUP * WIDTH * sizeof(float));
            for (ptrdiff_t k = 0; k < ins; k += DEPTH) {
                ptrdiff_t depth = ins - k < DEPTH ? ins - k : DEPTH;
                const char *part = (const char *)packed + (panel * ins + k) * WIDTH * size;
                if (short_weights) widen((const uint16_t *)part, wide, depth * WIDTH);
                const float *w = short_weights ? wide : (const float *)part;
                for (ptrdiff_t g = 0; g < groups; g++)
                    part_of(rows - g * GROUP, g < fetching ? lines : 0)(
                        scratch + (g * ins + k) * GROUP, w, depth, total + g * GROUP * WIDTH,
                        part + ahead + g * depth * step, step);
            }
            if (rank) {
                for (ptrdiff_t j = 0; j < WIDTH; j++)
                    for (ptrdiff_t r = 0; r < rank; r++)
                        adapter[r * WIDTH + j] = j < count ? b[(out + j) * rank + r] * scale : 0;
                for (ptrdiff_t g = 0; g < groups; g++)
                    part_of(rows - g * GROUP, 0)(low + g * rank * GROUP, adapter, rank,
                                                 total + g * GROUP * WIDTH, NULL, 0);
            }
            for (ptrdiff_t m = 0; m < rows; m++)
                for (ptrdiff_t j = 0; j < count; j++)
                    y[m * outs + out + j] = total[m * WIDTH + j] + (bias ? bias[out + j] : 0);
        }
    }
}
