/* Tiles of AMX: 16 rows of 32 numbers in bf16, or of 16 sums in float32. A product multiplies rows with columns
   of which pairs of numbers lie side by side. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SIDE = 16,           /* rows, or columns, of a tile */
    DEPTH = 32,          /* numbers of a row */
    TILE = SIDE * DEPTH, /* numbers of a tile */
};

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
static void begin_tiles(struct tile_settings *found) {
    struct tile_settings own = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        own.bytes[tile] = 64;
        own.rows[tile] = SIDE;
    }
    _tile_storeconfig(found);
    _tile_loadconfig(&own);
}

static void end_tiles(const struct tile_settings *found) { _tile_loadconfig(found); }
