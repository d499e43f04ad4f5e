/* The page streams that the tiles read: codec/streams.py. */
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

static status find_wide(planner *p, const layout *in, const settings *set) {
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
    for (int32_t r = 0; r < p->size.runs; r++) p->size.wide += wide[r];
    return DONE;
}

/* A run as some of its rows see it: of a causal one the pages that all of them see whole, then the
 * others one by one. `out` has room for MOST_PARTS. Returns how many there are. */
enum { MOST_PARTS = 2 * TILE_ROWS + 2 };

static int32_t unfold(const run *from, int32_t low, int32_t high, int32_t size, run *out) {
    run part = *from;
    int32_t count = 0, whole, last;
    part.low = low;
    part.high = high;
    part.seen += part.causal ? low - from->low : 0;
    if (!part.causal) {
        *out = part;
        return 1;
    }
    whole = least(part.pages, part.seen / size);
    last = least(part.pages, over(part.seen + high - low - 1, size));
    for (int32_t page = 0; page < last; page = page ? page + 1 : most(whole, 1)) {
        int32_t single = page > 0 || whole == 0, pages = single ? 1 : whole;
        int32_t begin = page * size, first = single ? most(0, begin - part.seen + 1) : 0;
        out[count++] = (run){
            part.node, part.page + (part.node < 0 ? begin : page), part.position + begin, pages,
            page + pages < part.pages ? size : part.tokens, single, part.seen + first - begin,
            low + first, high};
    }
    return count;
}

/* Calls for each part of a run in each tile: counts them by their first row, or places them. */
static int64_t place_run(planner *p, const run *r, int32_t page_size, placement *places) {
    const int32_t *tile_of = held(p, TILE_OF), *cuts = held(p, CUTS);
    int32_t *bucket = held(p, BUCKETS);
    int64_t placed = 0;
    run parts[MOST_PARTS];
    for (int32_t t = tile_of[r->low]; t <= tile_of[r->high - 1]; t++) {
        int32_t low = most(r->low, cuts[t]), high = least(r->high, cuts[t + 1]);
        int32_t count = unfold(r, low, high, page_size, parts);
        for (int32_t i = 0; i < count; i++) {
            int32_t row = parts[i].low;
            if (p->size.windowed && !within_window(p, parts + i, page_size)) continue;
            placed++;
            if (!places) bucket[row + 1]++;
            else places[bucket[row]++] = (placement){parts[i], t + p->size.wide, 0};
        }
    }
    return placed;
}

/* Wide runs, then the others a tile each, in the order of the first row that sees them. */
static status place_runs(planner *p, int32_t page_size) {
    const run *runs = held(p, RUNS);
    const int32_t *wide = held(p, WIDE);
    int32_t *bucket, at = 0;
    int64_t count = p->size.wide;
    placement *places;
    TAKE(bucket, BUCKETS, (int64_t)p->size.rows + 1);
    memset(bucket, 0, ((size_t)p->size.rows + 1) * sizeof *bucket);
    for (int32_t r = 0; r < p->size.runs; r++)
        if (!wide[r]) count += place_run(p, runs + r, page_size, NULL);
    if (count > INT32_MAX / (int64_t)sizeof(placement)) return TOO_LARGE;
    p->size.places = (int32_t)count;
    TAKE(places, PLACEMENTS, count);
    bucket[0] = p->size.wide;
    for (int32_t row = 0; row < p->size.rows; row++) bucket[row + 1] += bucket[row];
    for (int32_t r = 0; r < p->size.runs; r++) {
        if (wide[r]) {
            places[at] = (placement){runs[r], at, 0};
            at++;
        } else {
            place_run(p, runs + r, page_size, places);
        }
    }
    return DONE;
}

/* The first step of each region and the first page of each run in the streams. */
static status place_pages(planner *p, int32_t per_step, int64_t *words) {
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
            page += places[i].run.pages;
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
    low = (at->run.low - cuts[tile]) * group;
    /* Rows that the tile does not have may see anything. */
    high = at->run.high == cuts[tile + 1] ? TILE_ROWS : (at->run.high - cuts[tile]) * group;
    return low | high << 8;
}

/* A page that rows see in part is marked, so that the kernel skips the mask of the others. */
static int32_t marked(int32_t mask, int32_t page_size) {
    int32_t whole = TILE_ROWS << 8 | page_size << 16;
    return mask == whole ? mask : mask | 1 << MASKED_BIT;
}

static status lay_run(const planner *p, const layout *in, const placement *at, int32_t rows) {
    const run *r = &at->run;
    int32_t *restrict words = (int32_t *)held(p, WORDS) + at->page;
    int32_t *restrict masks = (int32_t *)held(p, MASKS) + at->page;
    const int32_t *restrict numbers = in->node_pages + (r->node < 0 ? 0 : r->page);
    int32_t full = in->page_size, count = r->pages, last = count - 1;
    int32_t mask = marked(rows | full << 16, full), all_bits = 0;
    if (r->node < 0) {
        for (int32_t i = 0; i < count; i++) all_bits |= words[i] = r->page + i * full;
    } else {
        for (int32_t i = 0; i < count; i++) all_bits |= words[i] = numbers[i];
    }
    if (all_bits < 0 || all_bits >= 1 << PAGE_BITS) return TOO_LARGE;
    for (int32_t i = 0; i < count; i++) {
        words[i] |= full << PAGE_BITS;
        masks[i] = mask;
    }
    if (r->tokens < full || r->causal) {
        int32_t seen = r->causal ? least(r->seen, full) : r->tokens;
        words[last] -= (full - r->tokens) << PAGE_BITS;
        masks[last] = marked(rows | seen << 16 | r->causal << CAUSAL_BIT, full);
    }
    if (r->node < 0)
        for (int32_t i = 0; i < r->pages; i++) words[i] |= INT32_MIN;
    return DONE;
}

static void lay_positions(const planner *p, const layout *in, const placement *at) {
    const run *r = &at->run;
    const int32_t *starts = held(p, STARTS);
    int32_t *positions = (int32_t *)held(p, POSITIONS) + at->page;
    int32_t *masks = (int32_t *)held(p, MASKS) + at->page, latest = 0;
    for (int32_t row = r->low; row < r->high; row++) latest = most(latest, starts[row]);
    for (int32_t i = 0; i < r->pages; i++) {
        positions[i] = r->position + i * in->page_size;
        if (positions[i] < latest) masks[i] |= 1 << MASKED_BIT;
    }
}

/* Places without a page, which end most regions. */
static void lay_nothing(const planner *p, int64_t from, int64_t to) {
    int32_t *words = held(p, WORDS), *masks = held(p, MASKS);
    int32_t *positions = p->size.windowed ? held(p, POSITIONS) : NULL;
    for (int64_t i = from; i < to; i++) {
        words[i] = 0;
        masks[i] = 1 << MASKED_BIT;
        if (positions) positions[i] = 0;
    }
}

static status lay_pages(planner *p, const layout *in, const settings *set, int64_t count) {
    const placement *places = held(p, PLACEMENTS);
    int32_t *words, *masks, *positions;
    int64_t end = 0;
    TAKE(words, WORDS, count);
    TAKE(masks, MASKS, count);
    TAKE(positions, POSITIONS, set->window ? count : 0);
    p->size.items = 0;
    for (int32_t i = 0; i < p->size.places; i++) {
        status found = lay_run(p, in, places + i, row_mask(p, places + i, set->group));
        if (found) return found;
        if (set->window) lay_positions(p, in, places + i);
        lay_nothing(p, end, places[i].page);
        end = (int64_t)places[i].page + places[i].run.pages;
        p->size.items |= places[i].run.node < 0;
    }
    lay_nothing(p, end, count);
    return DONE;
}

status plan_streams(planner *p, const layout *in, const settings *set) {
    int64_t words = 0;
    status found = find_tiles(p);
    if (!found) found = find_wide(p, in, set);
    if (!found) found = place_runs(p, in->page_size);
    if (!found) found = place_pages(p, STEP_TOKENS / in->page_size, &words);
    if (found) return found;
    p->size.words = (int32_t)words;
    return lay_pages(p, in, set, words);
}
