/* Plan of the tree kernel: from a layout of query rows to the tables of the device.
 *
 * The same as codec/rows.py, codec/tiles.py, codec/streams.py and codec/pieces.py, entry by entry;
 * these say what everything means. Arrays grow to the largest plan and are used again.
 */
#ifndef CODEC_PLANNER_H
#define CODEC_PLANNER_H

#include <stdint.h>

enum { TILE_ROWS = 64, STEP_TOKENS = 64 };
enum { PAGE_BITS = 24, TOKEN_BITS = 7, CAUSAL_BIT = 23, MASKED_BIT = 28 };
enum { RECORD = 16, MERGE_ROWS = 512, LEAST_WIDE_STEPS = 4 };

typedef enum { DONE, NO_MEMORY, BAD_LAYOUT, BAD_SETTINGS, TOO_LARGE } status;

typedef struct {
    const int32_t *node_parent;      /* [nodes] */
    const int32_t *node_page_indptr; /* [nodes + 1] */
    const int32_t *node_pages;       /* [pages] */
    const int32_t *node_tokens;      /* [nodes] */
    const int32_t *segment_indptr;   /* [segments + 1] */
    const int32_t *segment_node;     /* [segments] */
    const uint8_t *segment_is_item;  /* [segments] */
    int32_t page_size, nodes, pages, segments;
} layout;

typedef struct {
    int32_t group, bins, window;
    int32_t split, longest_first, max_splits;
    int32_t piece_cost, merge_cost, slack, wide_cost;
    int32_t pair_wide_cost, least_steps; /* of paired bins; 0: none are paired */
} settings;

typedef struct {
    int32_t rows, tiles, wide, runs, places, words, windowed;
    int32_t pieces, columns, records, record_size, partial_rows, items, merges, paired;
    int32_t total; /* int32 entries of all tables together */
} sizes;

typedef struct { int32_t node, row, rows, visible, partial, is_item; } unit;
typedef struct { int32_t node, page, position, pages, tokens, causal, seen, low, high; } run;
typedef struct { run run; int32_t region, page; } placement; /* page: its first in the streams */
typedef struct { int32_t bin, tile, first, steps, low, high, direct, partial, tokens; } piece;

typedef struct { void *at; int64_t bytes; } array;

enum {
    NODE_START, NODE_WHOLE, NODE_REST, NODE_UNITS, NODE_FIRST, NODE_NEXT, NODE_PARTIAL, NODE_ROWS,
    UNITS, ORDERED_UNITS, UNIT_ROW, ROWS, VISIBLE, STARTS, RUNS, TORN, CUTS,
    TILE_OF, WIDE, RUN_TILES, BUCKETS, PLACEMENTS, REGION_STEP, WORDS, MASKS, POSITIONS,
    PIECES, CUT_PIECES, ROOM, LOADS, ORDER, ROW_COUNT, MERGE_COUNT, MERGE, RECORDS, PAIRED, PAIR_WORK,
    ARRAYS
};

typedef struct {
    array arrays[ARRAYS];
    sizes size;
} planner;

/* The array `name` with room for `count` things of `bytes` each; NULL if memory is short. */
void *take(planner *p, int name, int64_t count, int64_t bytes);
void *held(const planner *p, int name);

/* Drops the pages that lie before the windows of all its rows; false if none is left. */
int within_window(const planner *p, run *one, int32_t page_size);

status plan_rows(planner *p, const layout *in, const settings *set);
status plan_streams(planner *p, const layout *in, const settings *set);
status plan_pieces(planner *p, const layout *in, const settings *set);

/* Puts bins together that read alike: codec/pairs.py. `size.paired`: the longest is long enough. */
status pair_bins(planner *p, const layout *in, const settings *set);

#define TAKE(variable, name, count)                                              \
    do {                                                                         \
        (variable) = take(p, (name), (count), (int64_t)sizeof(*(variable)));     \
        if (!(variable)) return NO_MEMORY;                                       \
    } while (0)

static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t over(int32_t a, int32_t b) { return a / b + (a % b != 0); } /* a >= 0 */

#endif
