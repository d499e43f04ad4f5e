/* Plan of the dense kernel for cascade prefill: from a layout to the tables of the device.
 *
 * The same as dense/streams.py, dense/tiles.py and dense/items.py, entry by entry; these say what
 * everything means. Arrays grow to the largest plan and are used again.
 */
#ifndef DENSE_PLANNER_H
#define DENSE_PLANNER_H

#include <stdint.h>

enum { TILE = 128, BLOCK = 128, TILE_FIELDS = 7, BLOCK_FIELDS = 4, ITEM_FIELDS = 8 };
enum { COPIED = 1, MASKED = 2, OWN = 4 };
enum { LEAST_FRESH_ROWS = 16, MOST_PACKED_ROWS = 1024 };
enum { ITEM_STEPS = 3, MERGE_STEPS = 4, MOST_WAVES = 3 };
#define EMPTY INT32_MIN

typedef enum { DONE, NO_MEMORY, BAD_LAYOUT, BAD_SETTINGS, TOO_LARGE } status;

typedef struct {
    const int32_t *parent, *indptr, *pages, *tokens; /* of nodes; indptr [nodes + 1] */
    const int32_t *segment_indptr, *segment_node;
    const uint8_t *is_item;
    int32_t page_size, nodes, num_pages, segments;
} layout;

typedef struct { int32_t query_heads, ctas; } settings;

typedef struct {
    int32_t sources, rows, rounds, blocks, columns, merged, tiles, partial_rows, tokens_read, total;
} sizes;

typedef struct { void *at; int64_t bytes; } array;

typedef struct { int32_t stream, node, read, order; } member; /* what a segment reads */
typedef struct { int32_t node, low, high, row; } piece;       /* row -1: in pages */
typedef struct { int32_t copied, start, tokens, chain_start; } stretch;
typedef struct { int32_t start, stop, stream, is_long; } group;
typedef struct { int32_t row, rows, shared_at, shared, own_at, own, target; } tile;
typedef struct { int32_t at, place, tokens, flags; } block;

enum {
    NODE_START, NODE_LOW, NODE_ROW, NODE_READERS, NODE_PLACE, NODE_HIGH, /* [nodes] */
    CHAIN, SEGMENT_OWN, SEGMENT_STREAM, MEMBERS,                          /* [segments] */
    STREAM_FIRST, STREAM_TOKENS, STREAM_ORDER, STREAM_LEAST, STREAM_AT, STREAM_BLOCKS,
    PIECES, STRETCHES, SOURCES, FIRST, SEEN, GROUPS, TILES, SORTED, CUT, COUNTS, BLOCKS,
    STEPS, LOADS, PARTS, TARGETS, ARRAYS
};

typedef struct {
    array arrays[ARRAYS];
    const layout *in;
    settings set;
    sizes size;
    int32_t rows, streams, tiles, blocks, block_room, final_tiles;
} dense;

void *take(dense *d, int name, int64_t count, int64_t bytes);
void *held(const dense *d, int name);

status plan_streams(dense *d);
status plan_tiles(dense *d);
status plan_items(dense *d);

#define TAKE(variable, name, count)                                          \
    do {                                                                     \
        (variable) = take(d, (name), (count), (int64_t)sizeof(*(variable))); \
        if (!(variable)) return NO_MEMORY;                                   \
    } while (0)

static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t over(int32_t a, int32_t b) { return a / b + (a % b != 0); } /* a >= 0 */
static inline int32_t steps(const tile *t) { return t->shared + t->own; }

#endif
