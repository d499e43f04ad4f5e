/* The planner's memory and what Python calls; see codec/native.py. */
#include <stdlib.h>
#include <string.h>

#include "codec_planner.h"

#ifdef EXACT_ARRAYS /* so that an address sanitizer sees every access beyond a plan's own sizes */
enum { ALWAYS_NEW = 1 };
#else
enum { ALWAYS_NEW = 0 };
#endif

void *take(planner *p, int name, int64_t count, int64_t bytes) {
    array *a = p->arrays + name;
    int64_t size;
    if (count < 0 || count > INT64_MAX / 2 / bytes) return NULL;
    size = count ? count * bytes : 1;
    if (a->at && size <= a->bytes && !ALWAYS_NEW) return a->at;
    free(a->at);
    if (!ALWAYS_NEW) size += size / 4;
    a->at = malloc((size_t)size);
    a->bytes = a->at ? size : 0;
    return a->at;
}

void *held(const planner *p, int name) { return p->arrays[name].at; }

planner *stemserve_planner_new(void) { return calloc(1, sizeof(planner)); }

void stemserve_planner_free(planner *p) {
    if (!p) return;
    for (int i = 0; i < ARRAYS; i++) free(p->arrays[i].at);
    free(p);
}

static status check_settings(const settings *set) {
    if (set->group < 1 || set->group > TILE_ROWS || set->window < 0) return BAD_SETTINGS;
    if (set->bins < 1 || set->bins > 1 << 20 || set->max_splits < 1) return BAD_SETTINGS;
    if (set->piece_cost < 0 || set->merge_cost < 0 || set->slack < 0) return BAD_SETTINGS;
    if (set->wide_cost < 1 || set->pair_wide_cost < 0) return BAD_SETTINGS;
    return DONE;
}

static int64_t table_entries(const sizes *s) {
    int64_t rows = s->rows, words = s->words;
    return rows + (s->tiles + 1) + 2 * (int64_t)s->wide + (s->wide + (int64_t)s->tiles + 1)
           + 5 * (int64_t)s->places + 2 * words + (s->windowed ? words + rows : 0)
           + 9 * (int64_t)s->pieces + rows + rows * s->columns + (int64_t)s->records * s->record_size;
}

static status plan_all(planner *p, const layout *in, const settings *set) {
    status found = plan_rows(p, in, set);
    if (!found) found = plan_streams(p, in, set);
    return found ? found : plan_pieces(p, in, set);
}

/* With pairs of bins where these are long enough; else as if there were none. */
static status plan_paired(planner *p, const layout *in, const settings *set) {
    settings paired = *set;
    status found;
    paired.wide_cost = set->pair_wide_cost;
    found = plan_all(p, in, &paired);
    if (!found) found = pair_bins(p, in, set);
    if (found || p->size.paired || !p->size.wide) return found;
    return plan_all(p, in, set);
}

/* Makes a plan and says how large its tables are. */
int stemserve_planner_plan(planner *p, const layout *in, const settings *set, sizes *out) {
    int64_t total;
    status found = check_settings(set);
    p->size.paired = 0;
    if (!found) found = set->pair_wide_cost ? plan_paired(p, in, set) : plan_all(p, in, set);
    if (found) return found;
    total = table_entries(&p->size);
    if (total > INT32_MAX) return TOO_LARGE;
    p->size.total = (int32_t)total;
    *out = p->size;
    return DONE;
}

static int32_t *put(int32_t *to, const void *from, int64_t count) {
    if (count) memcpy(to, from, (size_t)count * sizeof *to);
    return to + count;
}

static int32_t *put_wide(const planner *p, int32_t *to) {
    const placement *places = held(p, PLACEMENTS);
    for (int32_t w = 0; w < p->size.wide; w++) {
        to[w] = places[w].run.low;
        to[p->size.wide + w] = places[w].run.high;
    }
    return to + 2 * (int64_t)p->size.wide;
}

static int32_t *put_runs(const planner *p, int32_t *to) {
    const placement *places = held(p, PLACEMENTS);
    int64_t count = p->size.places;
    for (int64_t i = 0; i < count; i++) {
        to[i] = places[i].run.node;
        to[count + i] = places[i].page;
        to[2 * count + i] = places[i].run.pages;
        to[3 * count + i] = places[i].run.low;
        to[4 * count + i] = places[i].run.high;
    }
    return to + 5 * count;
}

static int32_t *put_pieces(const planner *p, int32_t *to) {
    const piece *pieces = held(p, PIECES);
    int64_t count = p->size.pieces;
    for (int64_t i = 0; i < count; i++) {
        const piece *one = pieces + i;
        to[i] = one->bin;
        to[count + i] = one->tile;
        to[2 * count + i] = one->first;
        to[3 * count + i] = one->steps;
        to[4 * count + i] = one->low;
        to[5 * count + i] = one->high;
        to[6 * count + i] = one->direct;
        to[7 * count + i] = one->partial;
        to[8 * count + i] = one->tokens;
    }
    return to + 9 * count;
}

/* Copies the tables of the last plan side by side, in the order of codec/native.py. */
int stemserve_planner_tables(const planner *p, int32_t *to, int64_t room) {
    const sizes *s = &p->size;
    if (room < s->total) return BAD_SETTINGS;
    to = put(to, held(p, ROWS), s->rows);
    to = put(to, held(p, CUTS), (int64_t)s->tiles + 1);
    to = put_wide(p, to);
    to = put(to, held(p, REGION_STEP), (int64_t)s->wide + s->tiles + 1);
    to = put_runs(p, to);
    to = put(to, held(p, WORDS), s->words);
    to = put(to, held(p, MASKS), s->words);
    to = put(to, held(p, POSITIONS), s->windowed ? s->words : 0);
    to = put(to, held(p, STARTS), s->windowed ? s->rows : 0);
    to = put_pieces(p, to);
    to = put(to, held(p, MERGE_COUNT), s->rows);
    to = put(to, held(p, MERGE), (int64_t)s->rows * s->columns);
    put(to, held(p, s->paired ? PAIRED : RECORDS), (int64_t)s->records * s->record_size);
    return DONE;
}

/* Lays the sections that the device reads where they belong: rows, records, counts of merges, merges
 * (in rows of `columns`), positions, starts, words, masks. */
void stemserve_planner_pack(
    const int32_t *tables, const sizes *s, const int32_t *starts, int32_t columns, int32_t *to) {
    int64_t rows = s->rows, words = s->words, windowed = s->windowed;
    const int32_t *at = tables + rows + 2 * (int64_t)s->tiles + 2 + 3 * (int64_t)s->wide + 5 * (int64_t)s->places;
    put(to + starts[0], tables, rows);
    put(to + starts[6], at, words);
    put(to + starts[7], at + words, words);
    put(to + starts[4], at + 2 * words, windowed * words);
    put(to + starts[5], at + (2 + windowed) * words, windowed * rows);
    at += (2 + windowed) * words + windowed * rows + 9 * (int64_t)s->pieces;
    put(to + starts[2], at, rows);
    at += rows;
    for (int64_t row = 0; row < rows; row++, at += s->columns) {
        int32_t *merge = put(to + starts[3] + row * columns, at, s->columns);
        for (int32_t i = s->columns; i < columns; i++) *merge++ = -1;
    }
    put(to + starts[1], at, (int64_t)s->records * s->record_size);
}
