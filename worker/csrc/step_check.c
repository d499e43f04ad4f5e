/* Whether a step's plan is right; see steps/native_check.py. It says no more than that: what is
 * wrong is said by steps/checks.py, which checks the same.
 */
#include <stdint.h>
#include <stdlib.h>

enum { RIGHT = 1, SLOTS_ASCEND = 2, ONE_TREE = 4, READS_SLOTS = 8 };

typedef struct { const int32_t *at; int64_t count; } array;

typedef struct {
    array token_ids, positions, kv_slots;
    array parent, page_indptr, pages, tokens;
    array segment_indptr, kind, node, kernel;
    array gather_rows, gather_indptr, gather_ids;
} plan;

typedef struct {
    int32_t vocab, context_tokens, page_size, kv_pages, slots, max_rows;
    int32_t prefill, decode, item, kinds, kernels;
} limits;

static int inside(array a, int64_t low, int64_t end) {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t i = 0; i < a.count; i++) {
        int32_t value = a.at[i];
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    return !a.count || (least >= low && most < end);
}

static int rises(array indptr, int64_t slices, int64_t total, int32_t least_step) {
    if (indptr.count != slices + 1 || indptr.at[0] != 0 || indptr.at[slices] != total) return 0;
    for (int64_t i = 0; i < slices; i++)
        if ((int64_t)indptr.at[i + 1] - indptr.at[i] < least_step) return 0;
    return 1;
}

static int rows_are_right(const plan *p, const limits *l) {
    int64_t rows = p->token_ids.count;
    return rows >= 1 && rows <= l->max_rows && p->positions.count == rows
           && p->kv_slots.count == rows && inside(p->token_ids, -(int64_t)l->slots, l->vocab)
           && inside(p->positions, 0, l->context_tokens)
           && inside(p->kv_slots, -1, (int64_t)l->kv_pages * l->page_size);
}

/* Nodes, and into `start` the tokens of each node's chain before it. */
static int forest_is_right(const plan *p, const limits *l, int64_t *start) {
    int64_t nodes = p->parent.count, size = l->page_size;
    if (p->tokens.count != nodes) return 0;
    if (!nodes && !p->page_indptr.count) return !p->pages.count;
    if (!rises(p->page_indptr, nodes, p->pages.count, 0)) return 0;
    if (!inside(p->pages, 0, l->kv_pages)) return 0;
    for (int64_t n = 0; n < nodes; n++) {
        int64_t up = p->parent.at[n], tokens = p->tokens.at[n], before = n - 1;
        int64_t pages = (int64_t)p->page_indptr.at[n + 1] - p->page_indptr.at[n];
        if (up < -1 || up >= n) return 0;
        if (tokens < 1 || tokens <= (pages - 1) * size || tokens > pages * size) return 0;
        if (up >= 0 && p->tokens.at[up] % size) return 0;
        while (before > up) before = p->parent.at[before]; /* up the path to the node before */
        if (before != up) return 0;
        start[n] = up < 0 ? 0 : start[up] + p->tokens.at[up];
        if (start[n] + tokens > INT32_MAX) return 0;
    }
    return 1;
}

static int segments_are_right(const plan *p, const limits *l) {
    int64_t segments = p->node.count;
    return p->kind.count == segments && p->kernel.count == segments
           && rises(p->segment_indptr, segments, p->token_ids.count, 1)
           && inside(p->node, -1, p->parent.count) && inside(p->kind, l->prefill, l->kinds)
           && inside(p->kernel, 0, l->kernels);
}

/* A segment's rows: what they are in the chain, and where they are stored. */
static int places_are_right(const plan *p, const limits *l, const int64_t *start, int64_t segment) {
    const int32_t *positions = p->positions.at, *slots = p->kv_slots.at;
    int64_t begin = p->segment_indptr.at[segment], end = p->segment_indptr.at[segment + 1];
    int64_t node = p->node.at[segment], rows = end - begin;
    int64_t chain = node < 0 ? 0 : start[node] + p->tokens.at[node];
    int is_item = p->kind.at[segment] == l->item;
    int64_t first = is_item ? chain : chain - rows;
    if (!is_item && (node < 0 || rows > chain)) return 0;
    if (p->kind.at[segment] == l->decode && rows != 1) return 0;
    for (int64_t row = end - 1; row >= begin; row--) {
        int64_t place = first + row - begin, inner, page;
        if (positions[row] != place) return 0;
        if (slots[row] == -1) continue;
        if (is_item) return 0;
        while (place < start[node]) node = p->parent.at[node];
        inner = place - start[node];
        page = p->pages.at[p->page_indptr.at[node] + inner / l->page_size];
        if (slots[row] != page * l->page_size + inner % l->page_size) return 0;
    }
    return 1;
}

static int gathers_are_right(const plan *p, const limits *l) {
    int64_t gathers = p->gather_rows.count;
    if (!inside(p->gather_rows, 0, p->token_ids.count)) return 0;
    if (!inside(p->gather_ids, 0, l->vocab)) return 0;
    if (!p->gather_indptr.count) return !gathers && !p->gather_ids.count;
    return rises(p->gather_indptr, gathers, p->gather_ids.count, 0);
}

static int ascends(array slots) {
    int32_t before = -1;
    for (int64_t i = 0; i < slots.count; i++) {
        if (slots.at[i] < 0) continue;
        if (slots.at[i] <= before) return 0;
        before = slots.at[i];
    }
    return 1;
}

/* Whether all segments are prefill of one tree, with the same kernel forced, and read every node:
 * a node is read if it is above a segment's. `is_read` is as long as there are nodes, zeroed. */
static int is_one_tree(const plan *p, const limits *l, char *is_read) {
    int64_t nodes = p->parent.count;
    for (int64_t s = 0; s < p->node.count; s++) {
        if (p->kind.at[s] == l->decode || p->kernel.at[s] != p->kernel.at[0]) return 0;
        if (p->node.at[s] >= 0) is_read[p->node.at[s]] = 1;
        else if (nodes) return 0;
    }
    for (int64_t n = nodes - 1; n >= 0; n--) {
        if (!is_read[n] || (n && p->parent.at[n] < 0)) return 0;
        if (n) is_read[p->parent.at[n]] = 1;
    }
    return 1;
}

static int reads_slots(array token_ids) {
    for (int64_t i = 0; i < token_ids.count; i++)
        if (token_ids.at[i] < 0) return 1;
    return 0;
}

static int check(const plan *p, const limits *l, int64_t *start) {
    int found = RIGHT;
    if (!rows_are_right(p, l) || !forest_is_right(p, l, start)) return 0;
    if (!segments_are_right(p, l) || !gathers_are_right(p, l)) return 0;
    for (int64_t s = 0; s < p->node.count; s++)
        if (!places_are_right(p, l, start, s)) return 0;
    if (ascends(p->kv_slots)) found |= SLOTS_ASCEND;
    if (reads_slots(p->token_ids)) found |= READS_SLOTS;
    return found;
}

/* `arrays`: those of a plan, in its order; `counts`: their lengths. 0: something is wrong, or there
 * is no memory. */
int stemserve_step_check(const limits *l, const int64_t *counts, const char *const *arrays) {
    plan p;
    array *into = (array *)&p;
    int64_t *start;
    char *is_read;
    int found = 0;
    for (unsigned i = 0; i < sizeof p / sizeof *into; i++) {
        into[i].at = (const int32_t *)(const void *)arrays[i];
        into[i].count = counts[i];
    }
    start = malloc((size_t)(p.parent.count + 1) * sizeof *start);
    is_read = calloc((size_t)p.parent.count + 1, 1);
    if (start && is_read) found = check(&p, l, start);
    if (found && is_one_tree(&p, l, is_read)) found |= ONE_TREE;
    free(start);
    free(is_read);
    return found;
}
