/* Tiles of rows and the blocks of tokens that each reads; see dense/tiles.py. */
#include <string.h>

#include "dense_planner.h"

/* Room for so many blocks more; NULL if memory is short. */
static block *more_blocks(dense *d, int64_t count) {
    int64_t wanted = d->blocks + count;
    block *before = held(d, BLOCKS), *now;
    if (wanted <= d->block_room) return before + d->blocks;
    if (wanted > INT32_MAX / 8) return NULL;
    wanted += wanted / 2 + 64;
    now = take(d, SORTED, wanted, sizeof *now); /* then the two change places */
    if (!now) return NULL;
    if (d->blocks) memcpy(now, before, (size_t)d->blocks * sizeof *now);
    array kept = d->arrays[SORTED];
    d->arrays[SORTED] = d->arrays[BLOCKS];
    d->arrays[BLOCKS] = kept;
    d->block_room = (int32_t)wanted;
    return now + d->blocks;
}

static status find_groups(dense *d, int32_t *found) {
    const layout *in = d->in;
    const int32_t *own = held(d, SEGMENT_OWN), *stream = held(d, SEGMENT_STREAM);
    int32_t count = 0;
    group *groups;
    TAKE(groups, GROUPS, in->segments);
    for (int32_t s = 0; s < in->segments; s++) {
        int32_t start = in->segment_indptr[s], stop = in->segment_indptr[s + 1];
        int32_t is_long = own[s] > MOST_PACKED_ROWS && own[s] == stop - start;
        group *last = groups + count - 1;
        if (start == stop) continue;
        if (count && last->stream == stream[s] && !last->is_long && !is_long) {
            last->stop = stop;
        } else {
            groups[count++] = (group){start, stop, stream[s], is_long};
        }
    }
    *found = count;
    return DONE;
}

static status put_stream(dense *d, int32_t s, int32_t *at, int32_t *count) {
    const int32_t *first = held(d, STREAM_FIRST), *lowest = held(d, STREAM_LEAST);
    const stretch *stretches = held(d, STRETCHES);
    int64_t total = 0;
    block *to;
    for (int32_t i = first[s]; i < first[s + 1]; i++) total += over(stretches[i].tokens, BLOCK);
    to = more_blocks(d, total);
    if (!to) return NO_MEMORY;
    for (int32_t i = first[s]; i < first[s + 1]; i++) {
        stretch one = stretches[i];
        for (int32_t step = 0; step < one.tokens; step += BLOCK) {
            int32_t left = one.tokens - step, place = one.chain_start + step;
            int masked = left < BLOCK || place + BLOCK > lowest[s];
            int32_t flags = (one.copied ? COPIED : 0) | (masked ? MASKED : 0);
            *to++ = (block){one.start + step, place, left, flags};
        }
    }
    *at = d->blocks;
    *count = (int32_t)total;
    d->blocks += *count;
    return DONE;
}

/* A segment whose rows see each other: tile i sees i whole blocks of them, and its own. */
static status add_long(dense *d, const group *g) {
    const int32_t *tokens = held(d, STREAM_TOKENS);
    int32_t count = over(g->stop - g->start, TILE), first, above, last;
    tile *tiles = held(d, TILES);
    status found = put_stream(d, g->stream, &first, &above);
    block *to = found ? NULL : more_blocks(d, 2 * (int64_t)count - 1);
    if (!to) return found ? found : NO_MEMORY;
    for (int32_t i = 0; i < count - 1; i++) *to++ = (block){g->start + i * TILE, 0, 0, 0};
    last = d->blocks + count - 1;
    for (int32_t i = 0; i < count; i++) {
        int32_t at = g->start + i * TILE;
        *to++ = (block){at, 0, 0, MASKED | OWN};
        tiles[d->tiles++] =
            (tile){at, least(g->stop - at, TILE), first, above + i, last + i, 1, at};
    }
    d->blocks += 2 * count - 1;
    d->size.tokens_read += tokens[g->stream] + g->stop - g->start;
    return DONE;
}

/* Blocks of the step's rows that some row of the tile sees. */
static status put_own(dense *d, tile *t) {
    const int32_t *first = held(d, FIRST);
    int32_t low = t->row + TILE, highest = 0, count;
    block *to;
    for (int32_t row = t->row; row < t->row + t->rows; row++) {
        if (first[row] <= row) low = least(low, first[row]);
        highest = most(highest, first[row]);
    }
    count = low < t->row + TILE ? over(t->row + t->rows - low, BLOCK) : 0;
    to = more_blocks(d, count);
    if (!to) return NO_MEMORY;
    t->own_at = d->blocks;
    t->own = count;
    for (int32_t i = 0; i < count; i++) {
        int32_t at = low + i * BLOCK;
        int whole = at + BLOCK <= t->row && highest <= at;
        *to++ = (block){at, 0, 0, whole ? 0 : MASKED | OWN};
    }
    d->blocks += count;
    if (count) d->size.tokens_read += t->row + t->rows - low;
    return DONE;
}

static status add_packed(dense *d, const group *groups, int32_t count) {
    const int32_t *tokens = held(d, STREAM_TOKENS);
    int32_t *at_of = held(d, STREAM_AT), *blocks_of = held(d, STREAM_BLOCKS);
    tile *tiles = held(d, TILES);
    int32_t begin = d->tiles;
    for (int32_t i = 0; i < count; i++) {
        const group *g = groups + i;
        if (g->is_long) continue;
        if (at_of[g->stream] < 0) {
            status found = put_stream(d, g->stream, at_of + g->stream, blocks_of + g->stream);
            if (found) return found;
        }
        for (int32_t row = g->start; row < g->stop; row += TILE) {
            tiles[d->tiles++] = (tile){row, least(g->stop - row, TILE), at_of[g->stream],
                                       blocks_of[g->stream], 0, 0, row};
        }
        d->size.tokens_read += tokens[g->stream];
    }
    for (tile *t = tiles + begin; t < tiles + d->tiles; t++) {
        status found = put_own(d, t);
        if (found) return found;
        if (!steps(t)) t->own_at = 0, t->own = 1; /* the block that nobody sees */
    }
    return DONE;
}

status plan_tiles(dense *d) {
    int32_t count, *at_of, *blocks_of;
    int64_t most_tiles = 0;
    tile *tiles;
    block *nothing;
    status found = find_groups(d, &count);
    const group *groups = held(d, GROUPS);
    if (found) return found;
    for (int32_t i = 0; i < count; i++) most_tiles += over(groups[i].stop - groups[i].start, TILE);
    TAKE(tiles, TILES, most_tiles);
    TAKE(at_of, STREAM_AT, d->streams);
    TAKE(blocks_of, STREAM_BLOCKS, d->streams);
    for (int32_t s = 0; s < d->streams; s++) at_of[s] = -1;
    d->tiles = d->blocks = d->size.tokens_read = 0;
    nothing = more_blocks(d, 1);
    if (!nothing) return NO_MEMORY;
    *nothing = (block){0, 0, 0, MASKED};
    d->blocks = 1;
    for (int32_t i = 0; i < count && !found; i++)
        if (groups[i].is_long) found = add_long(d, groups + i);
    if (!found) found = add_packed(d, groups, count);
    d->size.blocks = d->blocks;
    return found;
}
