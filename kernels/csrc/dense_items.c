/* Items of the dense kernel: tiles and heads dealt out, and tiles divided where few; see
 * dense/items.py. */
#include <string.h>

#include "dense_planner.h"

static const int32_t PIECE_COUNTS[] = {1, 2, 3, 4, 5, 6, 8, 11, 16};
enum { LIMITS = sizeof PIECE_COUNTS / sizeof *PIECE_COUNTS };

/* Stable, longest first: a count of each length. */
static status sort_tiles(dense *d, const tile *from, int32_t count, tile *to) {
    int32_t longest = 0, *places, at = 0;
    for (int32_t i = 0; i < count; i++) longest = most(longest, steps(from + i));
    TAKE(places, STEPS, (int64_t)longest + 1);
    memset(places, 0, ((size_t)longest + 1) * sizeof *places);
    for (int32_t i = 0; i < count; i++) places[steps(from + i)]++;
    for (int32_t length = longest; length >= 0; length--) {
        int32_t here = places[length];
        places[length] = at;
        at += here;
    }
    for (int32_t i = 0; i < count; i++) to[places[steps(from + i)]++] = from[i];
    return DONE;
}

/* Pieces of a tile, none of them empty; its own blocks stay together. */
static int32_t piece_count(const tile *t, int32_t limit) {
    int32_t total = steps(t), top = t->own > 0 ? total / t->own : total;
    return least(most(over(total, limit), 1), top);
}

static tile piece_of(const tile *t, int32_t piece, int32_t count) {
    int32_t start = least((int32_t)((int64_t)piece * steps(t) / count), t->shared);
    int32_t stop = least((int32_t)((int64_t)(piece + 1) * steps(t) / count), t->shared);
    int is_last = piece + 1 == count;
    tile cut = *t;
    cut.shared_at += start;
    cut.shared = (is_last ? t->shared : stop) - start;
    cut.own = is_last ? t->own : 0;
    return cut;
}

static int32_t lane_of(int64_t item, int32_t ctas) {
    int32_t lane = (int32_t)(item % ctas);
    return item / ctas % 2 ? ctas - 1 - lane : lane;
}

/* Steps of the busiest CTA. */
static status makespan(dense *d, int32_t limit, int32_t *found) {
    const tile *tiles = held(d, TILES);
    int32_t heads = d->set.query_heads, ctas = d->set.ctas, longest = 0, *lengths;
    int64_t item = 0, *loads, busiest = 0;
    for (int32_t i = 0; i < d->tiles; i++) longest = most(longest, steps(tiles + i));
    TAKE(lengths, STEPS, (int64_t)longest + 1);
    TAKE(loads, LOADS, ctas);
    memset(lengths, 0, ((size_t)longest + 1) * sizeof *lengths);
    memset(loads, 0, (size_t)ctas * sizeof *loads);
    for (int32_t i = 0; i < d->tiles; i++) {
        int32_t count = piece_count(tiles + i, limit);
        for (int32_t p = 0; p < count; p++) {
            tile cut = piece_of(tiles + i, p, count);
            lengths[steps(&cut)]++;
        }
    }
    for (int32_t length = longest; length >= 0; length--) {
        int64_t end = item + (int64_t)lengths[length] * heads;
        for (; item < end; item++) loads[lane_of(item, ctas)] += length + ITEM_STEPS;
    }
    for (int32_t c = 0; c < ctas; c++) busiest = loads[c] > busiest ? loads[c] : busiest;
    *found = busiest > INT32_MAX ? INT32_MAX : (int32_t)busiest;
    return DONE;
}

/* The longest piece that is worth its merge; 0: whole tiles. */
static status choose_limit(dense *d, int32_t *chosen) {
    const tile *tiles = held(d, TILES);
    int32_t longest = 0, whole = 0, best = 0, best_limit = 0, before = 0;
    *chosen = 0;
    if (!d->tiles || (int64_t)d->tiles * d->set.query_heads > MOST_WAVES * (int64_t)d->set.ctas)
        return DONE;
    for (int32_t i = 0; i < d->tiles; i++) longest = most(longest, steps(tiles + i));
    for (int32_t i = 0; i < LIMITS; i++) {
        int32_t limit = over(longest, PIECE_COUNTS[i]), span;
        status found;
        if (limit == before) continue;
        before = limit;
        found = makespan(d, limit, &span);
        if (found) return found;
        if (!i) whole = span;
        if (!i || span <= best) best = span, best_limit = limit; /* of equals the shortest */
    }
    if (best + MERGE_STEPS > 0.95 * whole) return DONE;
    *chosen = best_limit;
    return DONE;
}

static status cut_tiles(dense *d, int32_t limit) {
    const tile *tiles = held(d, TILES);
    int32_t count = 0, columns = 1, merged = 0, *counts, *parts, *targets;
    int64_t total = 0, partial = 0, at = d->rows, to = 0;
    tile *cut;
    TAKE(counts, COUNTS, d->tiles);
    for (int32_t i = 0; i < d->tiles; i++) {
        counts[i] = limit ? piece_count(tiles + i, limit) : 1;
        total += counts[i];
        columns = most(columns, counts[i]);
        if (counts[i] == 1) continue;
        merged += tiles[i].rows;
        partial += (int64_t)tiles[i].rows * counts[i];
    }
    if (total > INT32_MAX / 16 || partial + d->rows > INT32_MAX) return TOO_LARGE;
    TAKE(cut, CUT, total);
    TAKE(targets, TARGETS, merged);
    TAKE(parts, PARTS, (int64_t)merged * columns);
    for (int32_t i = 0; i < d->tiles; i++) {
        const tile *t = tiles + i;
        for (int32_t p = 0; p < counts[i]; p++) {
            tile *one = cut + count++;
            *one = piece_of(t, p, counts[i]);
            if (counts[i] > 1) one->target = (int32_t)(at + (int64_t)p * t->rows);
        }
        if (counts[i] == 1) continue;
        for (int32_t r = 0; r < t->rows; r++, to++) {
            targets[to] = t->row + r;
            for (int32_t p = 0; p < columns; p++)
                parts[to * columns + p] = p < counts[i] ? (int32_t)(at + r + p * t->rows) : -1;
        }
        at += (int64_t)t->rows * counts[i];
    }
    d->size.tiles = count;
    d->size.columns = columns;
    d->size.merged = merged;
    d->size.partial_rows = (int32_t)partial;
    return DONE;
}

status plan_items(dense *d) {
    int32_t limit;
    int64_t items;
    tile *sorted;
    status found;
    TAKE(sorted, SORTED, d->tiles);
    found = sort_tiles(d, held(d, TILES), d->tiles, sorted);
    if (found) return found;
    array other = d->arrays[SORTED];
    d->arrays[SORTED] = d->arrays[TILES];
    d->arrays[TILES] = other;
    found = choose_limit(d, &limit);
    if (!found) found = cut_tiles(d, limit);
    if (found) return found;
    TAKE(sorted, SORTED, d->size.tiles);
    if (limit) {
        found = sort_tiles(d, held(d, CUT), d->size.tiles, sorted);
    } else {
        memcpy(sorted, held(d, CUT), (size_t)d->size.tiles * sizeof *sorted);
    }
    items = (int64_t)d->size.tiles * d->set.query_heads;
    if (items > INT32_MAX / 64) return TOO_LARGE;
    d->size.rounds = over((int32_t)items, d->set.ctas);
    return found;
}

/* [ctas, rounds, ITEM_FIELDS] */
void put_items(const dense *d, int32_t *to) {
    const tile *tiles = held(d, SORTED);
    int32_t heads = d->set.query_heads, ctas = d->set.ctas, rounds = d->size.rounds;
    int64_t items = (int64_t)d->size.tiles * heads;
    memset(to, 0, (size_t)((int64_t)ctas * rounds * ITEM_FIELDS) * sizeof *to);
    for (int64_t i = 0; i < items; i++) {
        int32_t *item = to + ((int64_t)lane_of(i, ctas) * rounds + i / ctas) * ITEM_FIELDS;
        memcpy(item, tiles + i / heads, TILE_FIELDS * sizeof *item);
        item[TILE_FIELDS] = (int32_t)(i % heads);
    }
}
