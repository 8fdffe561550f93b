/* Linear layers of few rows in bf16, for CPUs with AMX.

   A decode step reads all weights and computes little with each, so a product must read memory without a
   pause. Weights are packed in panels of 16 outputs, which are read once, in order. A panel is a row of tiles
   of DEPTH inputs, in which pairs of inputs of the outputs lie side by side. Rows are packed in the same way,
   in blocks of up to four tiles. Four tiles of sums are in registers: those of one or two tiles of rows with
   two panels, or those of three or four with one. Meanwhile weights that come soon are fetched. Numbers are
   summed in float32 in the order of the inputs, so a result does not depend on the number of threads or of
   rows.

   A LoRA adapter is added in the same call: low = scale x A^T is computed before the panels and rounded to
   bf16, and low B^T is one more part of each panel. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SIDE = 16,            /* rows, or outputs, of a tile */
    DEPTH = 32,           /* inputs of a tile */
    TILE = SIDE * DEPTH,  /* numbers of a tile */
    MOST_TILES = 4,       /* of rows in a block */
    BLOCK = MOST_TILES * SIDE,
    PART = MOST_TILES * TILE, /* numbers of a block with the same inputs */
    LINE = 64,            /* bytes of a cache line */
    LINES = TILE * 2 / LINE,
    AHEAD = 8192, /* bytes between the weights in use and those that are fetched */
};

typedef uint16_t bf16;

static inline __attribute__((always_inline)) void fetch(const bf16 *weights) {
    for (int line = 0; line < LINES; line++)
        _mm_prefetch((const char *)weights + AHEAD + line * LINE, _MM_HINT_T1);
}

struct tile_settings {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

/* 1 if the system lets this process use the tiles. */
int strop_allow_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Eight tiles of 16 rows of 64 bytes; `found` gets the settings of others, who may rely on them. */
static void begin(struct tile_settings *found) {
    struct tile_settings own = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        own.bytes[tile] = 64;
        own.rows[tile] = SIDE;
    }
    _tile_storeconfig(found);
    _tile_loadconfig(&own);
}

static void end(const struct tile_settings *found) { _tile_loadconfig(found); }

static inline void clear(float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* sums += x w^T for one or two tiles of rows and two panels */
static inline void add_two_panels(const bf16 *x, const bf16 *first, const bf16 *second, ptrdiff_t parts,
                                  int tiles, float *sums) {
    for (; parts > 0; parts--, x += PART, first += TILE, second += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, first, 64);
        fetch(first);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second, 64);
        fetch(second);
        _tile_dpbf16ps(1, 4, 7);
        if (tiles > 1) {
            _tile_loadd(5, x + TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* sums += x w^T for four tiles of rows and one panel */
static inline void add_panel(const bf16 *x, const bf16 *w, ptrdiff_t parts, float *sums) {
    for (; parts > 0; parts--, x += PART, w += TILE) {
        _tile_loadd(7, w, 64);
        fetch(w);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, x + TILE, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, x + 2 * TILE, 64);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(4, x + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
}

/* sums [4][SIDE][SIDE] */
static inline void finish(float *sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SIDE * SIDE, 64);
    _tile_stored(2, sums + 2 * SIDE * SIDE, 64);
    _tile_stored(3, sums + 3 * SIDE * SIDE, 64);
}

static inline ptrdiff_t divided(ptrdiff_t count, ptrdiff_t by) { return (count + by - 1) / by; }

static inline ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Panels come in twos. */
static inline ptrdiff_t panels_of(ptrdiff_t outs) { return 2 * divided(outs, 2 * SIDE); }

/* Numbers of a packed weight [outs][ins] */
ptrdiff_t strop_packed_size(ptrdiff_t outs, ptrdiff_t ins) {
    return panels_of(outs) * divided(ins, DEPTH) * TILE;
}

/* tile [SIDE][DEPTH]: the first rows and columns of `from`, zeros where it has none */
static inline void copy_tile(const bf16 *from, bf16 *tile, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t stride) {
    if (rows < SIDE || columns < DEPTH) memset(tile, 0, TILE * sizeof(bf16));
    for (ptrdiff_t row = 0; row < smaller(rows, SIDE); row++)
        memcpy(tile + row * DEPTH, from + row * stride, smaller(columns, DEPTH) * sizeof(bf16));
}

void strop_pack(const bf16 *weight, bf16 *packed, ptrdiff_t outs, ptrdiff_t ins, int threads) {
    ptrdiff_t parts = divided(ins, DEPTH);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (ptrdiff_t panel = 0; panel < panels_of(outs); panel++)
        for (ptrdiff_t part = 0; part < parts; part++) {
            uint32_t pairs[SIDE][DEPTH / 2];
            ptrdiff_t from = panel * SIDE * ins + part * DEPTH;
            copy_tile(weight + from, (bf16 *)pairs, outs - panel * SIDE, ins - part * DEPTH, ins);
            uint32_t *to = (uint32_t *)(packed + (panel * parts + part) * TILE);
            for (int pair = 0; pair < DEPTH / 2; pair++)
                for (int out = 0; out < SIDE; out++) to[pair * SIDE + out] = pairs[out][pair];
        }
}

/* The sums of a block of rows with two panels go to `to`, [tiles][2][SIDE][SIDE]. */
static inline void multiply(const bf16 *x, const bf16 *w, ptrdiff_t parts, const bf16 *low, const bf16 *b,
                            ptrdiff_t low_parts, int tiles, float *to) {
    if (tiles <= 2) {
        clear(to);
        add_two_panels(x, w, w + parts * TILE, parts, tiles, to);
        add_two_panels(low, b, b + low_parts * TILE, low_parts, tiles, to);
        finish(to);
        return;
    }
    for (int panel = 0; panel < 2; panel++) {
        float *sums = to + panel * MOST_TILES * SIDE * SIDE;
        clear(sums);
        add_panel(x, w + panel * parts * TILE, parts, sums);
        add_panel(low, b + panel * low_parts * TILE, low_parts, sums);
        finish(sums);
    }
}

/* Where `multiply` has the sums of a row with a panel */
static inline const float *sums_of(const float *sums, ptrdiff_t row, int panel, int tiles) {
    ptrdiff_t tile = row / SIDE;
    ptrdiff_t place = tiles <= 2 ? 2 * tile + panel : panel * MOST_TILES + tile;
    return sums + (place * SIDE + row % SIDE) * SIDE;
}

static inline __m512 widened(const bf16 *from, __mmask16 mask) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store(bf16 *to, __mmask16 mask, __m512 numbers) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(numbers));
}

static inline int tiles_of(ptrdiff_t rows) { return divided(smaller(rows, BLOCK), SIDE); }

/* low = scale x A^T, packed like rows */
static void multiply_low(const bf16 *x, const bf16 *a, bf16 *low, ptrdiff_t rows, ptrdiff_t parts,
                         ptrdiff_t low_parts, float scale) {
    float sums[2 * BLOCK * SIDE] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (ptrdiff_t task = 0; task < divided(rows, BLOCK) * low_parts; task++) {
        ptrdiff_t block = task / low_parts;
        ptrdiff_t part = task % low_parts;
        int tiles = tiles_of(rows - block * BLOCK);
        bf16 *to = low + task * PART;
        multiply(x + block * parts * PART, a + part * 2 * parts * TILE, parts, NULL, NULL, 0, tiles, sums);
        for (ptrdiff_t row = 0; row < tiles * SIDE; row++)
            for (int panel = 0; panel < 2; panel++) {
                __m512 found = _mm512_load_ps(sums_of(sums, row, panel, tiles));
                store(to + row * DEPTH + panel * SIDE, 0xffff, _mm512_mul_ps(found, _mm512_set1_ps(scale)));
            }
    }
}

/* y [rows][outs] = x W^T + bias + scale (x A^T) B^T, with W, A [rank][ins] and B [outs][rank] packed. bias may
   be NULL; rank 0: no adapter. scratch: blocks of BLOCK rows with the inputs and the rank, each in whole
   parts. */
void strop_linear(const bf16 *x, bf16 *scratch, const bf16 *packed, const bf16 *bias, const bf16 *a,
                  const bf16 *b, float scale, ptrdiff_t rank, bf16 *y, ptrdiff_t rows, ptrdiff_t ins,
                  ptrdiff_t outs, int threads) {
    ptrdiff_t blocks = divided(rows, BLOCK);
    ptrdiff_t parts = divided(ins, DEPTH);
    ptrdiff_t low_parts = divided(rank, DEPTH);
    bf16 *low = scratch + blocks * parts * PART;
#pragma omp parallel num_threads(threads)
    {
        struct tile_settings found;
        float sums[2 * BLOCK * SIDE] __attribute__((aligned(64)));
        begin(&found);
#pragma omp for schedule(static)
        for (ptrdiff_t part = 0; part < parts; part++)
            for (ptrdiff_t row = 0; row < rows; row += SIDE)
                copy_tile(x + row * ins + part * DEPTH,
                          scratch + (row / BLOCK * parts + part) * PART + row % BLOCK / SIDE * TILE,
                          rows - row, ins - part * DEPTH, ins);
        if (rank) multiply_low(scratch, a, low, rows, parts, low_parts, scale);
#pragma omp for schedule(static)
        for (ptrdiff_t panel = 0; panel < panels_of(outs); panel += 2)
            for (ptrdiff_t block = 0; block < blocks; block++) {
                ptrdiff_t first = block * BLOCK;
                int tiles = tiles_of(rows - first);
                multiply(scratch + block * parts * PART, packed + panel * parts * TILE, parts,
                         low + block * low_parts * PART, b + panel * low_parts * TILE, low_parts, tiles, sums);
                for (int half = 0; half < 2; half++) {
                    ptrdiff_t out = (panel + half) * SIDE;
                    if (out >= outs) break;
                    __mmask16 mask = outs - out < SIDE ? (1 << (outs - out)) - 1 : 0xffff;
                    __m512 added = bias ? widened(bias + out, mask) : _mm512_setzero_ps();
                    for (ptrdiff_t row = 0; row < smaller(rows - first, BLOCK); row++)
                        store(y + (first + row) * outs + out, mask,
                              _mm512_add_ps(_mm512_load_ps(sums_of(sums, row, half, tiles)), added));
                }
            }
        end(&found);
    }
}
