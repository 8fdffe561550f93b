/* Linear layers of few rows in bf16, for CPUs with AMX.

   A decode step reads all weights and computes little with each, so a product must read memory without a
   pause. Weights are packed in tiles of 16 outputs (a panel) and DEPTH inputs, in which pairs of inputs of the
   outputs lie side by side. Rows are packed in the same way, in blocks of one or two tiles. Four tiles of sums
   are in registers: those of one tile of rows with four panels, or those of two tiles with two panels. They stay
   there for CHUNK inputs of a block and wait in the L2 cache meanwhile.

   The first block has one tile: its products are so few that the processor reads weights, which lie in the order
   in which they are used, as fast as memory gives them. The other blocks find them in the L2 cache. Numbers are
   summed in float32 in the order of the inputs, so a result does not depend on the number of threads or of rows.

   A LoRA adapter is added in the same call: low = scale x A^T is computed before the panels and rounded to
   bf16, and low B^T is one more chunk. */

#include "tiles.h"

enum {
    BLOCK = 2 * SIDE,     /* most rows of a block */
    PART = 2 * TILE,      /* numbers of a block with the same inputs */
    CHUNK = 28,           /* tiles of inputs */
    MOST_GROUP = 16,      /* panels of a group */
    SUM = SIDE * SIDE,    /* numbers of a tile of sums */
    SUMS = BLOCK * SIDE,  /* of a block with a panel */
};

typedef uint16_t bf16;

/* sums [4][SIDE][SIDE]. `fresh`: they are 0. */
static inline void load_sums(const float *sums, int fresh) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + SUM, 64);
    _tile_loadd(2, sums + 2 * SUM, 64);
    _tile_loadd(3, sums + 3 * SUM, 64);
}

static inline void store_sums(float *sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SUM, 64);
    _tile_stored(2, sums + 2 * SUM, 64);
    _tile_stored(3, sums + 3 * SUM, 64);
}

/* sums += x w^T for one tile of rows and four panels */
static inline void add_four_panels(const bf16 *x, const bf16 *w, ptrdiff_t parts) {
    for (ptrdiff_t part = 0; part < parts; part++, x += PART, w += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + parts * TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * parts * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * parts * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
}

/* sums += x w^T for two tiles of rows and two panels */
static inline void add_two_panels(const bf16 *x, const bf16 *first, const bf16 *second, ptrdiff_t parts) {
    for (; parts > 0; parts--, x += PART, first += TILE, second += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, first, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

static inline ptrdiff_t divided(ptrdiff_t count, ptrdiff_t by) { return (count + by - 1) / by; }

static inline ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Panels of a group: the fewer there are, the smaller, so that all threads have some. They come in fours. */
static inline ptrdiff_t group_of(ptrdiff_t panels) {
    if (panels >= 64 * MOST_GROUP) return MOST_GROUP;
    if (panels >= 128) return 8;
    return 4;
}

struct layout {
    ptrdiff_t panels, group, groups, parts;
};

static inline struct layout layout_of(ptrdiff_t outs, ptrdiff_t ins) {
    struct layout found;
    found.panels = divided(outs, SIDE);
    found.group = group_of(found.panels);
    found.groups = divided(found.panels, found.group);
    found.parts = divided(ins, DEPTH);
    return found;
}

/* Where the tiles of a chunk that begins with `part` are, those of the group's panels one after the other */
static inline ptrdiff_t place_of(struct layout w, ptrdiff_t group, ptrdiff_t part) {
    return (group * w.parts + part) * w.group * TILE;
}

/* Numbers of a packed weight [outs][ins] */
ptrdiff_t strop_packed_size(ptrdiff_t outs, ptrdiff_t ins) {
    struct layout w = layout_of(outs, ins);
    return w.groups * w.group * w.parts * TILE;
}

/* The blocks of so many rows: the first has one tile, the others two, the last one or two */
ptrdiff_t strop_blocks(ptrdiff_t rows) { return 1 + divided(rows, SIDE) / 2; }

static inline ptrdiff_t first_row(ptrdiff_t block) { return block ? (2 * block - 1) * SIDE : 0; }

static inline int tiles_of(ptrdiff_t block, ptrdiff_t rows) {
    return block && rows - first_row(block) > SIDE ? 2 : 1;
}

static inline ptrdiff_t rows_of(ptrdiff_t block, ptrdiff_t rows) {
    return smaller(rows - first_row(block), tiles_of(block, rows) * SIDE);
}

/* float32 numbers that each thread needs for so many rows */
ptrdiff_t strop_sums_size(ptrdiff_t rows) { return strop_blocks(rows) * MOST_GROUP * SUMS; }

/* tile [SIDE][DEPTH]: the first rows and columns of `from`, zeros where it has none */
static inline void copy_tile(const bf16 *from, bf16 *tile, ptrdiff_t rows, ptrdiff_t columns,
                             ptrdiff_t stride) {
    if (rows >= SIDE && columns >= DEPTH) {
        for (ptrdiff_t row = 0; row < SIDE; row++)
            memcpy(tile + row * DEPTH, from + row * stride, DEPTH * sizeof(bf16));
        return;
    }
    memset(tile, 0, TILE * sizeof(bf16));
    for (ptrdiff_t row = 0; row < smaller(rows, SIDE); row++)
        memcpy(tile + row * DEPTH, from + row * stride, smaller(columns, DEPTH) * sizeof(bf16));
}

void strop_pack(const bf16 *weight, bf16 *packed, ptrdiff_t outs, ptrdiff_t ins, int threads) {
    struct layout w = layout_of(outs, ins);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t group = 0; group < w.groups; group++)
        for (ptrdiff_t part = 0; part < w.parts; part++) {
            ptrdiff_t first = part / CHUNK * CHUNK;
            ptrdiff_t chunk = smaller(CHUNK, w.parts - first);
            for (ptrdiff_t panel = 0; panel < w.group; panel++) {
                uint32_t pairs[SIDE][DEPTH / 2];
                ptrdiff_t out = (group * w.group + panel) * SIDE;
                ptrdiff_t from = smaller(out, outs) * ins + part * DEPTH;
                copy_tile(weight + from, (bf16 *)pairs, outs - out, ins - part * DEPTH, ins);
                ptrdiff_t tile = place_of(w, group, first) + (panel * chunk + part - first) * TILE;
                uint32_t *to = (uint32_t *)(packed + tile);
                for (int pair = 0; pair < DEPTH / 2; pair++)
                    for (int j = 0; j < SIDE; j++) to[pair * SIDE + j] = pairs[j][pair];
            }
        }
}

/* sums [panels][SUMS] of a block += x w^T over a chunk, for some panels of a group from `panel` on: two, or
   four if the block has one tile of rows; sums_of finds them. */
static inline void add_panels(const bf16 *x, const bf16 *w, ptrdiff_t chunk, ptrdiff_t panel, int tiles,
                              int fresh, float *sums) {
    float *own = sums + panel * tiles * SUM;
    load_sums(own, fresh);
    if (tiles == 1)
        add_four_panels(x, w, chunk);
    else
        add_two_panels(x, w, w + chunk * TILE, chunk);
    store_sums(own);
}

/* Where add_panels has the sums of the rows of a tile with a panel. Two panels of two tiles share four tiles of
   sums: those of the first panel are the even ones. */
static inline const float *sums_of(const float *sums, ptrdiff_t tile, ptrdiff_t panel, int tiles) {
    if (tiles == 1) return sums + panel * SUM;
    return sums + (panel / 2 * 4 + tile * 2 + panel % 2) * SUM;
}

/* sums [blocks][group][SUMS] += x w^T of the blocks from `first` to `last` with a group */
static void add_group(const bf16 *x, const bf16 *packed, struct layout w, ptrdiff_t group, ptrdiff_t rows,
                      ptrdiff_t first, ptrdiff_t last, int fresh, float *sums) {
    for (ptrdiff_t part = 0; part < w.parts; part += CHUNK) {
        const bf16 *weights = packed + place_of(w, group, part);
        ptrdiff_t chunk = smaller(CHUNK, w.parts - part);
        for (ptrdiff_t four = 0; four < w.group; four += 4)
            for (ptrdiff_t block = first; block < last; block++) {
                int tiles = tiles_of(block, rows);
                for (ptrdiff_t panel = four; panel < four + 4; panel += tiles == 1 ? 4 : 2)
                    add_panels(x + (block * w.parts + part) * PART, weights + panel * chunk * TILE, chunk, panel,
                               tiles, fresh && part == 0, sums + (block - first) * w.group * SUMS);
            }
    }
}

static inline __m512 widened(const bf16 *from, __mmask16 mask) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store(bf16 *to, __mmask16 mask, __m512 numbers) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(numbers));
}

/* y [rows][outs] of a block gets its sums with a group, and the bias. */
static void write_block(const float *sums, const bf16 *bias, bf16 *y, ptrdiff_t rows, ptrdiff_t outs, int tiles,
                        struct layout w, ptrdiff_t group) {
    for (ptrdiff_t panel = 0; panel < w.group; panel++) {
        ptrdiff_t out = (group * w.group + panel) * SIDE;
        if (out >= outs) break;
        __mmask16 mask = outs - out < SIDE ? (1 << (outs - out)) - 1 : 0xffff;
        __m512 added = bias ? widened(bias + out, mask) : _mm512_setzero_ps();
        for (ptrdiff_t first = 0; first < rows; first += SIDE) {
            const float *from = sums_of(sums, first / SIDE, panel, tiles);
            bf16 *to = y + first * outs + out;
            for (ptrdiff_t row = 0; row < smaller(rows - first, SIDE); row++)
                store(to + row * outs, mask, _mm512_add_ps(_mm512_loadu_ps(from + row * SIDE), added));
        }
    }
}

/* low = scale x A^T, packed like rows */
static void multiply_low(const bf16 *x, const bf16 *a, bf16 *low, ptrdiff_t rows, struct layout w,
                         ptrdiff_t low_parts, float scale, float *sums) {
#pragma omp for schedule(static)
    for (ptrdiff_t task = 0; task < strop_blocks(rows) * w.groups; task++) {
        ptrdiff_t block = task / w.groups;
        ptrdiff_t group = task % w.groups;
        int tiles = tiles_of(block, rows);
        add_group(x, a, w, group, rows, block, block + 1, 1, sums);
        for (ptrdiff_t panel = 0; panel < w.group; panel++) {
            ptrdiff_t column = (group * w.group + panel) * SIDE;
            if (column >= low_parts * DEPTH) break;
            bf16 *to = low + (block * low_parts + column / DEPTH) * PART + column % DEPTH;
            for (ptrdiff_t tile = 0; tile < tiles; tile++) {
                const float *from = sums_of(sums, tile, panel, tiles);
                for (ptrdiff_t row = 0; row < SIDE; row++)
                    store(to + tile * TILE + row * DEPTH, 0xffff,
                          _mm512_mul_ps(_mm512_loadu_ps(from + row * SIDE), _mm512_set1_ps(scale)));
            }
        }
    }
}

/* y [rows][outs] = x W^T + bias + scale (x A^T) B^T, with W, A [rank][ins] and B [outs][rank] packed. bias may
   be NULL; rank 0: no adapter. scratch: blocks of BLOCK rows with the inputs and the rank, each in whole
   tiles. sums: strop_sums_size numbers per thread */
void strop_linear(const bf16 *x, bf16 *scratch, float *sums, const bf16 *packed, const bf16 *bias, const bf16 *a,
                  const bf16 *b, float scale, ptrdiff_t rank, bf16 *y, ptrdiff_t rows, ptrdiff_t ins,
                  ptrdiff_t outs, int threads) {
    extern int omp_get_thread_num(void);
    struct layout w = layout_of(outs, ins);
    struct layout b_layout = layout_of(outs, rank);
    ptrdiff_t blocks = strop_blocks(rows);
    bf16 *low = scratch + blocks * w.parts * PART;
#pragma omp parallel num_threads(threads)
    {
        struct tile_settings found;
        float *own = sums + omp_get_thread_num() * strop_sums_size(rows);
        begin_tiles(&found);
#pragma omp for schedule(static)
        for (ptrdiff_t part = 0; part < w.parts; part++)
            for (ptrdiff_t block = 0; block < blocks; block++)
                for (ptrdiff_t tile = 0; tile < tiles_of(block, rows); tile++) {
                    ptrdiff_t row = first_row(block) + tile * SIDE;
                    copy_tile(x + row * ins + part * DEPTH, scratch + (block * w.parts + part) * PART + tile * TILE,
                              rows - row, ins - part * DEPTH, ins);
                }
        if (rank) multiply_low(scratch, a, low, rows, layout_of(rank, ins), b_layout.parts, scale, own);
#pragma omp for schedule(static)
        for (ptrdiff_t group = 0; group < w.groups; group++) {
            add_group(scratch, packed, w, group, rows, 0, blocks, 1, own);
            if (rank) add_group(low, b, b_layout, group, rows, 0, blocks, 0, own);
            for (ptrdiff_t block = 0; block < blocks; block++)
                write_block(own + block * w.group * SUMS, bias, y + first_row(block) * outs, rows_of(block, rows), outs,
                            tiles_of(block, rows), w, group);
        }
        end_tiles(&found);
    }
}
