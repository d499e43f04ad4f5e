/* Pieces for the CTAs, the merge of their results and the kernel's records: codec/pieces.py. */
#include <string.h>

#include "codec_division.h"

static status make_divider(planner *p, const settings *set, divider *d) {
    const placement *places = held(p, PLACEMENTS);
    const int32_t *tile_of = held(p, TILE_OF);
    int32_t *tiles;
    memset(d, 0, sizeof *d);
    d->set = set;
    d->region_step = held(p, REGION_STEP);
    d->bins = set->bins;
    d->wide = p->size.wide;
    d->tiles = p->size.tiles;
    TAKE(tiles, RUN_TILES, 3 * (int64_t)d->wide);
    for (int32_t w = 0; w < d->wide; w++) {
        tiles[w] = tile_of[places[w].run.low];
        tiles[d->wide + w] = tile_of[places[w].run.high - 1] - tiles[w] + 1;
        d->wide_total += (int64_t)(d->region_step[w + 1] - d->region_step[w]) * tiles[d->wide + w];
    }
    d->wide_first = tiles;
    d->wide_tiles = tiles + d->wide;
    d->wide_cuts = tiles + 2 * (int64_t)d->wide;
    for (int32_t t = 0; t < d->tiles; t++) {
        int32_t steps = d->region_step[d->wide + t + 1] - d->region_step[d->wide + t];
        d->stream_total += steps;
        d->longest_stream = most(d->longest_stream, steps);
    }
    if (d->tiles > INT32_MAX / 2 - 4 * (int64_t)d->bins) return TOO_LARGE;
    d->limit = d->tiles + 4 * d->bins; /* a piece ends its tile or the room in a bin */
    TAKE(d->pieces, CUT_PIECES, d->limit);
    TAKE(d->other, PIECES, d->limit);
    TAKE(d->room, ROOM, 2 * (int64_t)d->bins);
    TAKE(d->load, LOADS, d->bins);
    TAKE(d->order, ORDER, d->tiles);
    TAKE(d->bucket, BUCKETS, (int64_t)d->longest_stream + 2);
    d->heap = d->room + d->bins;
    return DONE;
}

/* The first placement of the streams that ends after page `at`. */
static int32_t place_at(const planner *p, int32_t at) {
    const placement *places = held(p, PLACEMENTS);
    int32_t low = p->size.wide, high = p->size.places;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (places[middle].page <= at) low = middle;
        else high = middle;
    }
    return low;
}

/* Rows that each piece changes: the union over the runs that it covers. */
static void find_rows(const planner *p, const divider *d, int32_t per_step) {
    const placement *places = held(p, PLACEMENTS);
    const int32_t *cuts = held(p, CUTS);
    for (int32_t i = 0; i < d->count; i++) {
        piece *one = d->pieces + i;
        if (one->low < 0) {
            const run *region = &places[-1 - one->low].run;
            one->low = most(region->low, cuts[one->tile]);
            one->high = least(region->high, cuts[one->tile + 1]);
            continue;
        }
        int32_t end = (one->first + one->steps) * per_step;
        int32_t at = place_at(p, one->first * per_step);
        one->low = places[at].run.low;
        one->high = places[at].run.high;
        for (at++; at < p->size.places && places[at].page < end; at++) {
            one->low = least(one->low, places[at].run.low);
            one->high = most(one->high, places[at].run.high);
        }
    }
}

static status sort_by_bin(planner *p, const divider *d) {
    int32_t *start;
    piece *pieces;
    TAKE(start, LOADS, (int64_t)d->bins + 1);
    TAKE(pieces, PIECES, d->count);
    memset(start, 0, ((size_t)d->bins + 1) * sizeof *start);
    for (int32_t i = 0; i < d->count; i++) start[d->pieces[i].bin + 1]++;
    for (int32_t b = 0; b < d->bins; b++) start[b + 1] += start[b];
    for (int32_t i = 0; i < d->count; i++) pieces[start[d->pieces[i].bin]++] = d->pieces[i];
    p->size.pieces = d->count;
    return DONE;
}

/* Where the pieces' partial results go, and which of them make a row. */
static status find_merges(planner *p, int32_t group) {
    piece *pieces = held(p, PIECES);
    int32_t rows = p->size.rows, *covered, *merged, *merge;
    int64_t partial = 0;
    TAKE(covered, ROW_COUNT, rows);
    TAKE(merged, MERGE_COUNT, rows);
    memset(covered, 0, (size_t)rows * sizeof *covered);
    memset(merged, 0, (size_t)rows * sizeof *merged);
    for (int32_t i = 0; i < p->size.pieces; i++)
        for (int32_t row = pieces[i].low; row < pieces[i].high; row++) covered[row]++;
    p->size.columns = 1;
    for (int32_t i = 0; i < p->size.pieces; i++) {
        piece *one = pieces + i;
        one->direct = 1;
        for (int32_t row = one->low; row < one->high; row++) one->direct &= covered[row] == 1;
        one->partial = (int32_t)partial;
        if (one->direct) continue;
        partial += (int64_t)(one->high - one->low) * group;
        if (partial > INT32_MAX) return TOO_LARGE;
        for (int32_t row = one->low; row < one->high; row++)
            p->size.columns = most(p->size.columns, ++merged[row]);
    }
    p->size.partial_rows = (int32_t)partial;
    if ((int64_t)rows * p->size.columns > INT32_MAX) return TOO_LARGE;
    TAKE(merge, MERGE, (int64_t)rows * p->size.columns);
    memset(merge, 0xff, (size_t)rows * p->size.columns * sizeof *merge);
    memset(merged, 0, (size_t)rows * sizeof *merged);
    for (int32_t i = 0; i < p->size.pieces; i++) {
        const piece *one = pieces + i;
        if (one->direct) continue;
        for (int32_t row = one->low; row < one->high; row++)
            merge[(int64_t)row * p->size.columns + merged[row]++] = one->partial + (row - one->low) * group;
    }
    p->size.merges = 0;
    for (int32_t row = 0; row < rows; row++) {
        if (covered[row] == 1 && merged[row] == 0) merged[row] = -1;
        p->size.merges |= merged[row] >= 0;
    }
    return DONE;
}

static int32_t tokens_of(const int32_t *words, int32_t count) {
    int32_t tokens = 0;
    for (int32_t i = 0; i < count; i++) tokens += words[i] >> PAGE_BITS & ((1 << TOKEN_BITS) - 1);
    return tokens;
}

/* Tiles that read the same steps of a wide node follow each other. */
static void count_tokens(const planner *p, const divider *d, int32_t per_step) {
    const int32_t *words = held(p, WORDS);
    for (int32_t i = 0; i < d->count; i++) {
        piece *one = d->pieces + i, *before = i ? one - 1 : NULL;
        if (before && before->first == one->first && before->steps == one->steps)
            one->tokens = before->tokens;
        else
            one->tokens = tokens_of(words + (int64_t)one->first * per_step, one->steps * per_step);
    }
}

static void fill_record(const planner *p, const piece *one, int32_t group, int32_t per_step, int32_t *to) {
    const int32_t *cuts = held(p, CUTS), *rows = held(p, ROWS);
    int32_t base = cuts[one->tile], page = one->first * per_step, per_tile = over(TILE_ROWS, group);
    to[0] = base;
    to[1] = (cuts[one->tile + 1] - base) * group;
    to[2] = one->steps;
    to[3] = one->first;
    to[5] = (one->low - base) * group;
    to[6] = (one->high - base) * group;
    to[4] = one->partial - to[5];
    to[7] = one->direct;
    memcpy(to + RECORD, (const int32_t *)held(p, WORDS) + page, per_step * sizeof *to);
    memcpy(to + RECORD + per_step, (const int32_t *)held(p, MASKS) + page, per_step * sizeof *to);
    for (int32_t i = 0; i < per_tile; i++)
        to[RECORD + 2 * per_step + i] = rows[least(base + i, p->size.rows - 1)];
}

static status fill_records(planner *p, const settings *set, int32_t per_step) {
    const piece *pieces = held(p, PIECES);
    int32_t size = RECORD + 2 * per_step + over(TILE_ROWS, set->group), heads = 0, next, *table;
    int64_t count;
    for (int32_t i = 0; i < p->size.pieces; i++) heads += !i || pieces[i].bin != pieces[i - 1].bin;
    count = (int64_t)set->bins + p->size.pieces - heads;
    if (count * size > INT32_MAX) return TOO_LARGE;
    TAKE(table, RECORDS, count * size);
    memset(table, 0, (size_t)(count * size) * sizeof *table);
    for (int64_t i = 0; i < count; i++) table[i * size + 8] = -1;
    next = set->bins;
    for (int32_t i = 0, at = 0; i < p->size.pieces; i++) {
        int32_t head = !i || pieces[i].bin != pieces[i - 1].bin, before = at;
        at = head ? pieces[i].bin : next++;
        fill_record(p, pieces + i, set->group, per_step, table + (int64_t)at * size);
        if (!head) table[(int64_t)before * size + 8] = at;
    }
    p->size.records = (int32_t)count;
    p->size.record_size = size;
    return DONE;
}

status plan_pieces(planner *p, const layout *in, const settings *set) {
    int32_t per_step = STEP_TOKENS / in->page_size;
    divider d;
    status found = make_divider(p, set, &d);
    if (found) return found;
    share(&d, (int64_t)p->size.rows * set->group);
    find_rows(p, &d, per_step);
    count_tokens(p, &d, per_step);
    if (!(found = sort_by_bin(p, &d))) found = find_merges(p, set->group);
    return found ? found : fill_records(p, set, per_step);
}
