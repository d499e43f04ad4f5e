/* Division of the tiles' streams into pieces for the CTAs: codec/pieces.py. */
#include <string.h>

#include "codec_division.h"

static piece make_piece(int32_t bin, int32_t tile, int32_t first, int32_t steps) {
    return (piece){.bin = bin, .tile = tile, .first = first, .steps = steps};
}

static int64_t cost_of(int32_t steps) { return (int64_t)steps * STEP_TOKENS; }

static int32_t wide_steps(const divider *d, int32_t region) {
    return d->region_step[region + 1] - d->region_step[region];
}

/* How often each wide region is cut. Where two bins share what they read of it, all bins take part. */
static int count_cuts(divider *d, int32_t longest) {
    int64_t spare = d->bins;
    for (int32_t w = 0; w < d->wide; w++) {
        d->wide_cuts[w] = over(wide_steps(d, w), longest);
        spare -= (int64_t)d->wide_cuts[w] * d->wide_tiles[w];
    }
    if (spare < 0) return 0;
    while (d->wide && d->set->wide_cost < STEP_TOKENS) {
        int32_t top = 0;
        for (int32_t w = 1; w < d->wide; w++)
            if ((int64_t)wide_steps(d, w) * d->wide_cuts[top]
                > (int64_t)wide_steps(d, top) * d->wide_cuts[w])
                top = w;
        spare -= d->wide_tiles[top];
        if (spare < 0 || wide_steps(d, top) < LEAST_WIDE_STEPS * (d->wide_cuts[top] + 1)) break;
        d->wide_cuts[top]++;
    }
    return 1;
}

/* Each wide region cut alike for all its tiles, a bin a piece. False if there are too few bins. */
static int cut_wide(divider *d, int32_t longest) {
    d->count = 0;
    if (!count_cuts(d, longest)) return 0;
    for (int32_t w = 0; w < d->wide; w++) {
        int32_t steps = wide_steps(d, w), cuts = d->wide_cuts[w];
        for (int32_t cut = 0; cut < cuts; cut++) {
            int32_t start = (int32_t)((int64_t)cut * steps / cuts);
            int32_t stop = (int32_t)((int64_t)(cut + 1) * steps / cuts);
            for (int32_t i = 0; i < d->wide_tiles[w]; i++) {
                int32_t tile = d->wide_first[w] + i, owner = d->count;
                piece *one = d->pieces + d->count++;
                *one = make_piece(owner, tile, d->region_step[w] + start, stop - start);
                one->low = -1 - w;
            }
        }
    }
    return 1;
}

static int32_t stream_steps(const divider *d, int32_t tile) {
    return d->region_step[d->wide + tile + 1] - d->region_step[d->wide + tile];
}

/* Fills the bins with the tiles' streams in turn. False if they are full. */
static int cut_streams(divider *d, int32_t rooms) {
    int64_t left = 0;
    int32_t owner = -1, next = 0;
    for (int32_t tile = 0; tile < d->tiles; tile++) {
        int32_t start = 0, steps = stream_steps(d, tile);
        while (start < steps) {
            int32_t rest = steps - start, taken;
            if (left < 2 * STEP_TOKENS && left < cost_of(rest)) {
                if (next == rooms) return 0;
                left = d->room[next].left;
                owner = d->room[next++].bin;
                continue;
            }
            taken = left / STEP_TOKENS < rest ? (int32_t)(left / STEP_TOKENS) : rest;
            if (rest - taken == 1 && taken > 2) taken--; /* no piece of one step */
            if (d->count == d->limit) return 0;
            d->pieces[d->count++] =
                make_piece(owner, tile, d->region_step[d->wide + tile] + start, taken);
            left -= cost_of(taken) + d->set->piece_cost;
            start += taken;
        }
    }
    return 1;
}

/* Pieces of about `longest` steps a bin; false if the bins do not hold them. */
static int fits(divider *d, int64_t longest) {
    int64_t full = longest * STEP_TOKENS + d->set->slack, of_wide_steps;
    int32_t rooms = 0, of_wide;
    if (longest > INT32_MAX) return 0;
    of_wide_steps = longest * STEP_TOKENS / d->set->wide_cost;
    if (of_wide_steps < 1) of_wide_steps = 1;
    if (of_wide_steps > INT32_MAX || !cut_wide(d, (int32_t)of_wide_steps)) return 0;
    of_wide = d->count;
    if (d->bins * longest * STEP_TOKENS
        < d->stream_total * STEP_TOKENS + d->wide_total * d->set->wide_cost)
        return 0;
    for (int32_t i = 0; i < d->bins - of_wide; i++) d->room[rooms++] = (room){full, d->bins - 1 - i};
    for (int32_t i = 0; i < of_wide; i++) {
        int64_t left = full - d->set->piece_cost - (int64_t)d->pieces[i].steps * d->set->wide_cost;
        if (left >= STEP_TOKENS) d->room[rooms++] = (room){left, d->pieces[i].bin};
    }
    return cut_streams(d, rooms);
}

/* Such that the fullest bin holds least: bisection, from what no division beats. */
static void even_pieces(divider *d) {
    int64_t low = most(2, over(d->longest_stream, d->set->max_splits)), width = 1, high;
    int64_t of_wide = (d->wide_total * d->set->wide_cost + STEP_TOKENS - 1) / STEP_TOKENS;
    int64_t mean = (d->stream_total + of_wide + d->bins - 1) / d->bins;
    if (mean > low) low = mean;
    if (fits(d, low)) return;
    while (!fits(d, low + width)) {
        low += width;
        width *= 2;
    }
    high = low + width;
    while (high - low > 1 + low / 256) {
        int64_t middle = (low + high) / 2;
        if (fits(d, middle)) high = middle;
        else low = middle;
    }
    fits(d, high);
}

static int heavier(const room *a, const room *b) {
    return a->left > b->left || (a->left == b->left && a->bin > b->bin);
}

static void sift_down(room *heap, int32_t count) {
    room top = heap[0];
    int32_t at = 0;
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && heavier(heap + child, heap + child + 1)) child++;
        if (!heavier(&top, heap + child)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = top;
}

/* The tiles that have steps, those with the most first. */
static int32_t sort_tiles(divider *d) {
    int32_t count = 0;
    memset(d->bucket, 0, ((size_t)d->longest_stream + 2) * sizeof *d->bucket);
    for (int32_t t = 0; t < d->tiles; t++) d->bucket[d->longest_stream - stream_steps(d, t) + 1]++;
    for (int32_t s = 0; s <= d->longest_stream; s++) d->bucket[s + 1] += d->bucket[s];
    for (int32_t t = 0; t < d->tiles; t++) {
        int32_t steps = stream_steps(d, t);
        d->order[d->bucket[d->longest_stream - steps]++] = t;
        count += steps > 0;
    }
    return count;
}

/* Each tile to the emptiest bin, longest first, or to the bins in turn; the fullest bin's cost. */
static int64_t whole_tiles(divider *d, piece *pieces, int32_t *count) {
    int64_t fullest = 0;
    *count = 0;
    if (!d->set->longest_first) {
        for (int32_t t = 0; t < d->tiles; t++)
            if (stream_steps(d, t)) {
                int32_t owner = *count % d->bins;
                pieces[(*count)++] = make_piece(owner, t, d->region_step[d->wide + t], stream_steps(d, t));
            }
        return 0;
    }
    for (int32_t b = 0; b < d->bins; b++) d->heap[b] = (room){0, b};
    *count = sort_tiles(d);
    for (int32_t i = 0; i < *count; i++) {
        int32_t t = d->order[i], steps = stream_steps(d, t);
        pieces[i] = make_piece(d->heap[0].bin, t, d->region_step[d->wide + t], steps);
        d->heap[0].left += cost_of(steps) + d->set->piece_cost;
        if (d->heap[0].left > fullest) fullest = d->heap[0].left;
        sift_down(d->heap, d->bins);
    }
    return fullest - d->set->piece_cost;
}

/* Even pieces, or whole tiles where the merge that they save is worth uneven loads. */
void share(divider *d, int64_t rows) {
    int64_t merge, fullest = INT64_MIN, cost;
    int32_t count;
    if (!d->set->split) {
        whole_tiles(d, d->pieces, &d->count);
        return;
    }
    even_pieces(d);
    if (d->wide || 5 * (int64_t)d->tiles < 3 * (int64_t)d->bins || !d->set->longest_first) return;
    for (int32_t b = 0; b < d->bins; b++) d->load[b] = -d->set->piece_cost;
    for (int32_t i = 0; i < d->count; i++)
        d->load[d->pieces[i].bin] += cost_of(d->pieces[i].steps) + d->set->piece_cost;
    for (int32_t b = 0; b < d->bins; b++)
        if (d->load[b] > fullest) fullest = d->load[b];
    merge = d->set->merge_cost * (MERGE_ROWS + rows) / MERGE_ROWS;
    cost = whole_tiles(d, d->other, &count);
    if (cost <= fullest + merge) {
        d->count = count;
        memcpy(d->pieces, d->other, (size_t)count * sizeof *d->pieces);
    }
}
