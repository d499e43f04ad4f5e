/* Pairs of bins that read alike: codec/pairs.py. */
#include <string.h>

#include "codec_planner.h"

enum { STEPS = 2, FIRST = 3, NEXT = 8, SHARED = 9, OTHER_BASE = 10, LEAST_SHARED = 4 };

typedef struct {
    const int32_t *records, *words, *masks;
    int32_t count, size, bins, per_step, wide_end;
    int32_t *table; /* the records in their new order */
} pairing;

typedef struct {
    int32_t *start;  /* [bins + 1] of each bin's records in `chain` */
    int32_t *chain;  /* [count] in the order in which they are read */
    int32_t *target; /* [count] where each record goes */
    int32_t *key;    /* [bins] step whose pages the partner should read too, -1: none */
    int32_t *order;  /* [bins] */
    int32_t *single; /* [bins] */
} work;

static const int32_t *record_of(const pairing *in, int32_t record) {
    return in->records + (int64_t)record * in->size;
}

/* The records of each bin, and in `target` those after the first, whose places they keep. */
static void find_chains(const pairing *in, work *w) {
    int32_t used = 0, part = -1, last = -1;
    for (int32_t b = 0; b < in->bins; b++) {
        int32_t begin = used, record = record_of(in, b)[STEPS] ? b : -1;
        w->start[b] = begin;
        for (; record >= 0 && used < in->count; record = record_of(in, record)[NEXT]) {
            w->target[used] = record;
            w->chain[used++] = record;
        }
        w->key[b] = used > begin ? record_of(in, b)[FIRST] : -1;
        if (used == begin || w->key[b] >= in->wide_end) continue;
        part += w->key[b] != last;
        last = w->key[b];
        if (part % 2 == 0) continue;
        memmove(w->chain + begin, w->chain + begin + 1, (size_t)(used - begin - 1) * sizeof *w->chain);
        w->chain[used - 1] = b;
    }
    w->start[in->bins] = used;
}

static int same_pages(const pairing *in, int32_t step, int32_t other) {
    const int32_t *one, *two;
    if (step < 0 || other < 0) return step == other;
    one = in->words + (int64_t)step * in->per_step;
    two = in->words + (int64_t)other * in->per_step;
    if (*one != *two) return 0;
    return !memcmp(one, two, (size_t)in->per_step * sizeof *one);
}

static void find_partners(const pairing *in, work *w) {
    int32_t paired = 0, singles = 0;
    for (int32_t b = 0; b < in->bins; b++) w->order[b] = -1;
    for (int32_t b = 0; b < in->bins; b++) {
        int32_t waiting = -1;
        if (w->key[b] == -2) continue; /* has been placed */
        for (int32_t other = b, key = w->key[b]; other < in->bins; other++) {
            if (w->key[other] == -2 || !same_pages(in, key, w->key[other])) continue;
            w->key[other] = -2;
            if (waiting < 0) {
                waiting = other;
                continue;
            }
            w->order[paired++] = waiting;
            w->order[paired++] = other;
            waiting = -1;
        }
        if (waiting >= 0) w->single[singles++] = waiting;
    }
    memcpy(w->order + paired, w->single, (size_t)singles * sizeof *w->order);
}

/* Moves the records; `target` then says where each entry of `chain` went. */
static void move_records(const pairing *in, work *w) {
    int64_t row = (int64_t)in->size * sizeof *in->table;
    memcpy(in->table, in->records, (size_t)(in->count * row));
    memset(in->table, 0, (size_t)(in->bins * row));
    for (int32_t place = 0; place < in->bins; place++) {
        int32_t b = w->order[place], end = w->start[b + 1];
        in->table[(int64_t)place * in->size + NEXT] = -1;
        if (w->start[b] < end) w->target[w->start[b]] = place;
        for (int32_t i = w->start[b]; i < end; i++) {
            int32_t *to = in->table + (int64_t)w->target[i] * in->size;
            memcpy(to, record_of(in, w->chain[i]), (size_t)row);
            to[NEXT] = i + 1 < end ? w->target[i + 1] : -1;
        }
    }
}

/* First steps in which two pieces read the same pages, all rows whole; an even number. */
static int32_t common_steps(const pairing *in, const int32_t *a, const int32_t *b) {
    int32_t steps = least(a[STEPS], b[STEPS]), common = 0;
    if (a[FIRST] == b[FIRST]) return a[STEPS] == b[STEPS] ? steps : 0;
    for (; common < steps && same_pages(in, a[FIRST] + common, b[FIRST] + common); common++) {
        const int32_t *of_a = in->masks + (int64_t)(a[FIRST] + common) * in->per_step;
        const int32_t *of_b = in->masks + (int64_t)(b[FIRST] + common) * in->per_step;
        int32_t largest = 0;
        for (int32_t i = 0; i < in->per_step; i++) largest = most(largest, most(of_a[i], of_b[i]));
        if (largest >> MASKED_BIT) break;
    }
    common &= ~1;
    return common >= LEAST_SHARED ? common : 0;
}

static int32_t *moved(const pairing *in, const work *w, int32_t entry) {
    return in->table + (int64_t)w->target[entry] * in->size;
}

static void share_pair(const pairing *in, const work *w, int32_t one, int32_t other) {
    int32_t base[2] = {0, 0}, done[2] = {w->start[one], w->start[other]};
    for (int32_t i = w->start[one]; i < w->start[one + 1]; i++)
        for (int32_t j = done[1]; j < w->start[other + 1]; j++) {
            int32_t *a = moved(in, w, i), *b = moved(in, w, j);
            int32_t common = common_steps(in, a, b);
            if (!common) continue;
            while (done[0] < i) base[0] += moved(in, w, done[0]++)[STEPS];
            while (done[1] < j) base[1] += moved(in, w, done[1]++)[STEPS];
            a[SHARED] = b[SHARED] = common;
            a[OTHER_BASE] = base[1];
            b[OTHER_BASE] = base[0];
            base[0] += over(common, 2) + a[STEPS] - common;
            base[1] += over(common, 2) + b[STEPS] - common;
            done[0]++;
            done[1]++;
            break;
        }
}

static int32_t longest_bin(const planner *p) {
    const piece *pieces = held(p, PIECES);
    int32_t longest = 0, of_bin = 0;
    for (int32_t i = 0; i < p->size.pieces; i++) {
        of_bin = i && pieces[i].bin == pieces[i - 1].bin ? of_bin + pieces[i].steps : pieces[i].steps;
        longest = most(longest, of_bin);
    }
    return longest;
}

status pair_bins(planner *p, const layout *in, const settings *set) {
    int64_t bins = set->bins, count = p->size.records;
    int32_t *memory, *table;
    p->size.paired = longest_bin(p) >= set->least_steps;
    if (!p->size.paired) return DONE;
    TAKE(memory, PAIR_WORK, 4 * bins + 1 + 2 * count);
    TAKE(table, PAIRED, count * p->size.record_size);
    pairing plan = {
        .records = held(p, RECORDS),
        .words = held(p, WORDS),
        .masks = held(p, MASKS),
        .count = p->size.records,
        .size = p->size.record_size,
        .bins = set->bins,
        .per_step = STEP_TOKENS / in->page_size,
        .wide_end = ((const int32_t *)held(p, REGION_STEP))[p->size.wide],
        .table = table,
    };
    work w = {
        .start = memory,
        .chain = memory + bins + 1,
        .target = memory + bins + 1 + count,
        .key = memory + bins + 1 + 2 * count,
        .order = memory + 2 * bins + 1 + 2 * count,
        .single = memory + 3 * bins + 1 + 2 * count,
    };
    find_chains(&plan, &w);
    find_partners(&plan, &w);
    move_records(&plan, &w);
    for (int32_t place = 0; place + 1 < set->bins; place += 2)
        share_pair(&plan, &w, w.order[place], w.order[place + 1]);
    return DONE;
}
