/* The page streams that the tiles read: codec_streams.py. */
#include <string.h>

#include "codec_planner.h"

static status find_tiles(planner *p) {
    const int32_t *cuts = held(p, CUTS);
    int32_t *tile_of;
    TAKE(tile_of, TILE_OF, p->size.rows);
    for (int32_t tile = 0; tile < p->size.tiles; tile++)
        for (int32_t row = cuts[tile]; row < cuts[tile + 1]; row++) tile_of[row] = tile;
    return DONE;
}

static int32_t span_of(const int32_t *tile_of, const run *r) {
    return tile_of[r->high - 1] - tile_of[r->low] + 1;
}

/* Keeps only the largest of the wide runs, as many as have a CTA for each of their tiles. */
static void limit_wide(const planner *p, int32_t *wide, int32_t *order, int32_t count, int32_t bins) {
    const run *runs = held(p, RUNS);
    const int32_t *tile_of = held(p, TILE_OF);
    int64_t used = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t r = order[i], at = i;
        int64_t read = (int64_t)runs[r].pages * span_of(tile_of, runs + r);
        for (; at > 0; at--) { /* few are long enough to be here */
            const run *before = runs + order[at - 1];
            if ((int64_t)before->pages * span_of(tile_of, before) >= read) break;
            order[at] = order[at - 1];
        }
        order[at] = r;
    }
    for (int32_t i = 0; i < count; i++) {
        used += span_of(tile_of, runs + order[i]);
        if (used > bins) wide[order[i]] = 0;
    }
}

/* Marks the wide runs; finds how many there are, and how many places all runs have in streams. */
static status find_wide(planner *p, const layout *in, const settings *set, int64_t *places) {
    const run *runs = held(p, RUNS);
    const int32_t *tile_of = held(p, TILE_OF);
    int32_t *wide, *order, count = 0;
    int64_t read = 0;
    TAKE(wide, WIDE, p->size.runs);
    TAKE(order, ORDER, p->size.runs);
    for (int32_t r = 0; r < p->size.runs; r++)
        read += (int64_t)runs[r].pages * in->page_size * span_of(tile_of, runs + r);
    for (int32_t r = 0; r < p->size.runs; r++) {
        int64_t span = span_of(tile_of, runs + r), tokens = (int64_t)runs[r].pages * in->page_size;
        wide[r] = span > 1 && set->split && 2 * set->bins * tokens > read
                  && tokens > 2 * (int64_t)set->bins * STEP_TOKENS
                  && 2 * span <= set->bins && !runs[r].causal;
        if (wide[r]) order[count++] = r;
    }
    if (count > 1) limit_wide(p, wide, order, count, set->bins);
    p->size.wide = 0;
    *places = 0;
    for (int32_t r = 0; r < p->size.runs; r++) {
        p->size.wide += wide[r];
        *places += wide[r] ? 1 : span_of(tile_of, runs + r);
    }
    return *places <= INT32_MAX / (int64_t)sizeof(placement) ? DONE : TOO_LARGE;
}

/* Wide runs, then the others a tile each, in the order of the first row that sees them. */
static status place_runs(planner *p) {
    const run *runs = held(p, RUNS);
    const int32_t *tile_of = held(p, TILE_OF), *cuts = held(p, CUTS), *wide = held(p, WIDE);
    int32_t *bucket, at = 0;
    placement *places;
    TAKE(bucket, BUCKETS, (int64_t)p->size.rows + 1);
    TAKE(places, PLACEMENTS, p->size.places);
    memset(bucket, 0, ((size_t)p->size.rows + 1) * sizeof *bucket);
    for (int32_t r = 0; r < p->size.runs; r++) {
        if (wide[r]) {
            places[at] = (placement){r, at, runs[r].low, runs[r].high, 0};
            at++;
            continue;
        }
        bucket[runs[r].low + 1]++;
        for (int32_t t = tile_of[runs[r].low] + 1; t <= tile_of[runs[r].high - 1]; t++)
            bucket[cuts[t] + 1]++;
    }
    bucket[0] = at;
    for (int32_t row = 0; row < p->size.rows; row++) bucket[row + 1] += bucket[row];
    for (int32_t r = 0; r < p->size.runs; r++) {
        if (wide[r]) continue;
        for (int32_t t = tile_of[runs[r].low]; t <= tile_of[runs[r].high - 1]; t++) {
            int32_t low = most(runs[r].low, cuts[t]);
            places[bucket[low]++] =
                (placement){r, t + p->size.wide, low, least(runs[r].high, cuts[t + 1]), 0};
        }
    }
    return DONE;
}

/* The first step of each region and the first page of each run in the streams. */
static status place_pages(planner *p, int32_t per_step, int64_t *words) {
    const run *runs = held(p, RUNS);
    placement *places = held(p, PLACEMENTS);
    int32_t regions = p->size.wide + p->size.tiles, *region_step;
    int64_t page = 0, step = 0;
    int32_t i = 0;
    TAKE(region_step, REGION_STEP, (int64_t)regions + 1);
    for (int32_t region = 0; region < regions; region++) {
        region_step[region] = (int32_t)step;
        page = step * per_step;
        for (; i < p->size.places && places[i].region == region; i++) {
            places[i].page = (int32_t)page;
            page += runs[places[i].run].pages;
            if (page > INT32_MAX / 4 - STEP_TOKENS) return TOO_LARGE;
        }
        step = (page + per_step - 1) / per_step;
    }
    region_step[regions] = (int32_t)step;
    *words = (step + 1) * per_step; /* the kernel looks a step ahead */
    return DONE;
}

static int32_t row_mask(const planner *p, const placement *at, int32_t group) {
    const int32_t *cuts = held(p, CUTS);
    int32_t tile = at->region - p->size.wide, low, high;
    if (tile < 0) return TILE_ROWS << 8;
    low = (at->low - cuts[tile]) * group;
    /* Rows that the tile does not have may see anything. */
    high = at->high == cuts[tile + 1] ? TILE_ROWS : (at->high - cuts[tile]) * group;
    return low | high << 8;
}

static status lay_run(const planner *p, const layout *in, const placement *at, int32_t rows) {
    const run *r = (const run *)held(p, RUNS) + at->run;
    int32_t *words = (int32_t *)held(p, WORDS) + at->page;
    int32_t *masks = (int32_t *)held(p, MASKS) + at->page;
    int32_t full = in->page_size, last = r->pages - 1;
    for (int32_t i = 0; i < r->pages; i++) {
        int32_t number = r->node < 0 ? r->page + i * full : in->node_pages[r->page + i];
        if (number < 0 || number >= 1 << PAGE_BITS) return TOO_LARGE;
        words[i] = number | full << PAGE_BITS;
        masks[i] = rows | full << 16;
    }
    if (r->tokens < full || r->causal) {
        int32_t seen = r->seen + (r->causal ? at->low - r->low : 0);
        words[last] -= (full - r->tokens) << PAGE_BITS;
        masks[last] = rows | least(seen, full) << 16 | r->causal << CAUSAL_BIT;
    }
    if (r->node < 0)
        for (int32_t i = 0; i < r->pages; i++) words[i] |= INT32_MIN;
    return DONE;
}

static void lay_positions(const planner *p, const layout *in, const placement *at) {
    const run *r = (const run *)held(p, RUNS) + at->run;
    const int32_t *starts = held(p, STARTS);
    int32_t *positions = (int32_t *)held(p, POSITIONS) + at->page;
    int32_t *masks = (int32_t *)held(p, MASKS) + at->page, latest = 0;
    for (int32_t row = at->low; row < at->high; row++) latest = most(latest, starts[row]);
    for (int32_t i = 0; i < r->pages; i++) {
        positions[i] = r->position + i * in->page_size;
        if (positions[i] < latest) masks[i] |= 1 << MASKED_BIT;
    }
}

static status lay_pages(planner *p, const layout *in, const settings *set, int64_t count) {
    const placement *places = held(p, PLACEMENTS);
    const run *runs = held(p, RUNS);
    int32_t *words, *masks, *positions, whole = TILE_ROWS << 8 | in->page_size << 16;
    TAKE(words, WORDS, count);
    TAKE(masks, MASKS, count);
    TAKE(positions, POSITIONS, set->window ? count : 0);
    memset(words, 0, (size_t)count * sizeof *words);
    memset(masks, 0, (size_t)count * sizeof *masks);
    if (set->window) memset(positions, 0, (size_t)count * sizeof *positions);
    p->size.items = 0;
    for (int32_t i = 0; i < p->size.places; i++) {
        status found = lay_run(p, in, places + i, row_mask(p, places + i, set->group));
        if (found) return found;
        if (set->window) lay_positions(p, in, places + i);
        p->size.items |= runs[places[i].run].node < 0;
    }
    for (int64_t i = 0; i < count; i++)
        if (masks[i] != whole) masks[i] |= 1 << MASKED_BIT;
    return DONE;
}

status plan_streams(planner *p, const layout *in, const settings *set) {
    int64_t places, words;
    status found = find_tiles(p);
    if (!found) found = find_wide(p, in, set, &places);
    if (found) return found;
    p->size.places = (int32_t)places;
    if (!(found = place_runs(p))) found = place_pages(p, STEP_TOKENS / in->page_size, &words);
    if (found) return found;
    p->size.words = (int32_t)words;
    return lay_pages(p, in, set, words);
}
