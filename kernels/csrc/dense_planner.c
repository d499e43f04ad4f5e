/* The planner's memory and what Python calls; see dense/native.py. */
#include <stdlib.h>
#include <string.h>

#include "dense_planner.h"

void put_items(const dense *d, int32_t *to);

void *take(dense *d, int name, int64_t count, int64_t bytes) {
    array *a = d->arrays + name;
    int64_t size;
    if (count < 0 || count > INT64_MAX / 2 / bytes) return NULL;
    size = count ? count * bytes : 1;
    if (a->at && size <= a->bytes) return a->at;
    free(a->at);
    size += size / 4;
    a->at = malloc((size_t)size);
    a->bytes = a->at ? size : 0;
    return a->at;
}

void *held(const dense *d, int name) { return d->arrays[name].at; }

dense *stemserve_dense_new(void) { return calloc(1, sizeof(dense)); }

void stemserve_dense_free(dense *d) {
    if (!d) return;
    for (int i = 0; i < ARRAYS; i++) free(d->arrays[i].at);
    free(d);
}

static int64_t padded(int64_t count) { return (count + 3) / 4 * 4; }

/* Makes a plan and says how large its tables are. */
int stemserve_dense_plan(dense *d, const layout *in, const settings *set, sizes *out) {
    sizes *s = &d->size;
    int64_t total;
    status found;
    if (set->query_heads < 1 || set->ctas < 1 || set->ctas > 1 << 20) return BAD_SETTINGS;
    d->in = in;
    d->set = *set;
    found = plan_streams(d);
    if (!found) found = plan_tiles(d);
    if (!found) found = plan_items(d);
    d->in = NULL;
    if (found) return found;
    total = padded(s->sources) + 2 * padded(s->rows)
            + padded((int64_t)set->ctas * s->rounds * ITEM_FIELDS)
            + padded((int64_t)s->blocks * BLOCK_FIELDS) + padded((int64_t)s->merged * s->columns)
            + padded(s->merged) + padded((int64_t)s->tiles * TILE_FIELDS);
    if (total > INT32_MAX) return TOO_LARGE;
    s->total = (int32_t)total;
    *out = *s;
    return DONE;
}

static int32_t *put(int32_t *to, const void *from, int64_t count) {
    if (count) memcpy(to, from, (size_t)count * sizeof *to);
    for (int64_t i = count; i < padded(count); i++) to[i] = 0;
    return to + padded(count);
}

/* All tables, each from a multiple of four entries on. */
int stemserve_dense_tables(const dense *d, int32_t *to, int64_t room) {
    const sizes *s = &d->size;
    int64_t items = (int64_t)d->set.ctas * s->rounds * ITEM_FIELDS;
    if (room < s->total) return BAD_SETTINGS;
    to = put(to, held(d, SOURCES), s->sources);
    to = put(to, held(d, FIRST), s->rows);
    to = put(to, held(d, SEEN), s->rows);
    put_items(d, to);
    to += padded(items); /* items are whole multiples */
    to = put(to, held(d, BLOCKS), (int64_t)s->blocks * BLOCK_FIELDS);
    to = put(to, held(d, PARTS), (int64_t)s->merged * s->columns);
    to = put(to, held(d, TARGETS), s->merged);
    put(to, held(d, SORTED), (int64_t)s->tiles * TILE_FIELDS);
    return DONE;
}
