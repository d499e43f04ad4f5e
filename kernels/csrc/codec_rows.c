/* Rows in depth-first order, the runs of pages that they see, and tiles of them: codec/rows.py. */
#include <stdlib.h>
#include <string.h>

#include "codec_planner.h"

static status check_layout(const layout *in) {
    if (in->nodes < 0 || in->pages < 0 || in->segments < 0) return BAD_LAYOUT;
    if (in->page_size < 1 || STEP_TOKENS % in->page_size) return BAD_LAYOUT;
    if (in->node_page_indptr[0] < 0 || in->node_page_indptr[in->nodes] > in->pages) return BAD_LAYOUT;
    for (int32_t n = 0; n < in->nodes; n++) {
        int64_t pages = (int64_t)in->node_page_indptr[n + 1] - in->node_page_indptr[n];
        int32_t parent = in->node_parent[n], tokens = in->node_tokens[n];
        if (parent < -1 || parent >= n || tokens < 0 || pages < 0) return BAD_LAYOUT;
        if (over(tokens, in->page_size) > pages) return BAD_LAYOUT;
    }
    if (in->segment_indptr[0] != 0) return BAD_LAYOUT;
    for (int32_t s = 0; s < in->segments; s++) {
        if (in->segment_indptr[s + 1] < in->segment_indptr[s]) return BAD_LAYOUT;
        if (in->segment_node[s] < -1 || in->segment_node[s] >= in->nodes) return BAD_LAYOUT;
    }
    return in->segment_indptr[in->segments] < 1 << PAGE_BITS ? DONE : TOO_LARGE;
}

static status find_starts(planner *p, const layout *in) {
    int32_t *start;
    TAKE(start, NODE_START, in->nodes);
    for (int32_t n = 0; n < in->nodes; n++) {
        int32_t parent = in->node_parent[n];
        int64_t at = parent < 0 ? 0 : (int64_t)start[parent] + in->node_tokens[parent];
        if (at + in->node_tokens[n] > INT32_MAX) return TOO_LARGE;
        start[n] = (int32_t)at;
    }
    return DONE;
}

/* Units of one segment; written to `out` unless that is NULL. */
static int64_t split_segment(const layout *in, const int32_t *start, int32_t segment, unit *out) {
    int32_t row = in->segment_indptr[segment], left = in->segment_indptr[segment + 1] - row;
    int32_t node = in->segment_node[segment], is_item = in->segment_is_item[segment] != 0;
    int32_t visible = node < 0 ? 0 : start[node] + in->node_tokens[node];
    int64_t count = 0;
    if (left == 0) return 0;
    if (left == 1 || is_item) {
        if (out) *out = (unit){node, row, left, visible + is_item, 0, is_item};
        return 1;
    }
    while (left > 0) {
        int32_t here = node < 0 ? left : least(left, visible - start[node]);
        if (here > 0) {
            int32_t partial = here > 1 && node >= 0;
            if (out)
                out[count] = (unit){node, row + left - here, here, most(0, visible - here + 1), partial, 0};
            count++;
        }
        left -= here;
        if (left > 0) {
            visible = start[node];
            node = in->node_parent[node];
        }
    }
    return count;
}

static status find_units(planner *p, const layout *in, int64_t *count) {
    const int32_t *start = held(p, NODE_START);
    unit *units;
    int64_t total = 0, at = 0;
    for (int32_t s = 0; s < in->segments; s++) total += split_segment(in, start, s, NULL);
    TAKE(units, UNITS, total);
    for (int32_t s = 0; s < in->segments; s++) at += split_segment(in, start, s, units + at);
    *count = total;
    return DONE;
}

/* Entries of node n are at n + 1, those of node -1 at 0. */
static status order_units(planner *p, const layout *in, int64_t count) {
    const unit *units = held(p, UNITS);
    int32_t nodes = in->nodes + 1, *below, *direct, *first, *next, *partial;
    unit *ordered;
    TAKE(below, NODE_UNITS, nodes);
    TAKE(direct, NODE_REST, nodes);
    TAKE(first, NODE_FIRST, nodes + 1);
    TAKE(next, NODE_NEXT, nodes);
    TAKE(partial, NODE_PARTIAL, nodes);
    TAKE(ordered, ORDERED_UNITS, count);
    memset(direct, 0, nodes * sizeof *direct);
    memset(partial, 0, nodes * sizeof *partial);
    for (int64_t u = 0; u < count; u++) {
        direct[units[u].node + 1]++;
        partial[units[u].node + 1] += units[u].partial;
    }
    memcpy(below, direct, nodes * sizeof *below);
    for (int32_t n = in->nodes; n > 0; n--)
        if (in->node_parent[n - 1] >= 0) below[in->node_parent[n - 1] + 1] += below[n];
    first[0] = 0;
    next[0] = direct[0];
    for (int32_t n = 1; n < nodes; n++) {
        int32_t parent = in->node_parent[n - 1] + 1;
        first[n] = next[parent];
        next[parent] += below[n];
        next[n] = first[n] + direct[n];
    }
    /* From here on where the next partial and the next other unit of a node go. */
    for (int32_t n = 0; n < nodes; n++) {
        next[n] = first[n];
        direct[n] = first[n] + partial[n];
    }
    for (int64_t u = 0; u < count; u++) {
        int32_t n = units[u].node + 1;
        ordered[units[u].partial ? next[n]++ : direct[n]++] = units[u];
    }
    return DONE;
}

static status lay_rows(planner *p, const settings *set, int64_t count) {
    const unit *units = held(p, ORDERED_UNITS);
    int32_t *unit_row, *rows, *visible, *starts, at = 0;
    TAKE(unit_row, UNIT_ROW, count + 1);
    TAKE(rows, ROWS, p->size.rows);
    TAKE(visible, VISIBLE, p->size.rows);
    TAKE(starts, STARTS, p->size.rows);
    for (int64_t u = 0; u < count; u++) {
        int32_t step = units[u].node >= 0 || units[u].is_item;
        unit_row[u] = at;
        for (int32_t i = 0; i < units[u].rows; i++, at++) {
            rows[at] = units[u].row + i;
            visible[at] = units[u].visible + i * step;
            starts[at] = most(0, visible[at] - set->window);
        }
    }
    unit_row[count] = at;
    return DONE;
}

/* Leading pages of each node that all rows below it see whole; how many runs there are at most. */
static int64_t count_runs(planner *p, const layout *in, int64_t units_count, int32_t *whole) {
    const unit *units = held(p, ORDERED_UNITS);
    const int32_t *start = held(p, NODE_START), *first = held(p, NODE_FIRST);
    const int32_t *partial = held(p, NODE_PARTIAL);
    int64_t count = 2 * (int64_t)in->nodes;
    for (int32_t n = 0; n < in->nodes; n++) {
        whole[n] = over(in->node_tokens[n], in->page_size);
        for (int32_t b = 0; b < partial[n + 1]; b++)
            whole[n] = least(whole[n], (units[first[n + 1] + b].visible - start[n]) / in->page_size);
        count += partial[n + 1];
    }
    for (int64_t u = 0; u < units_count; u++) count += units[u].is_item;
    return count;
}

/* The pages of node n that all rows below it see, then those that all but partial units see. */
static run *emit_node(const planner *p, const layout *in, int32_t n, int32_t whole, run *out) {
    const int32_t *start = held(p, NODE_START), *first = held(p, NODE_FIRST);
    const int32_t *below = held(p, NODE_UNITS), *unit_row = held(p, UNIT_ROW);
    const int32_t *partial = held(p, NODE_PARTIAL);
    int32_t size = in->page_size, tokens = in->node_tokens[n], pages = over(tokens, size);
    int32_t page = in->node_page_indptr[n], unit0 = first[n + 1];
    int32_t low = unit_row[unit0], high = unit_row[unit0 + below[n + 1]];
    int32_t rest = unit_row[unit0 + partial[n + 1]], tail = tokens - (pages - 1) * size;
    int32_t last = whole < pages ? size : tail;
    if (below[n + 1] == 0 || pages == 0) return out;
    if (whole > 0) *out++ = (run){n, page, start[n], whole, last, 0, tokens, low, high};
    if (whole < pages && rest < high)
        *out++ = (run){n, page + whole, start[n] + whole * size, pages - whole, tail, 0,
                       tokens - whole * size, rest, high};
    return out;
}

/* From the first page on that is not whole, a run for the rows of each partial unit. */
static run *emit_partial(const planner *p, const layout *in, int32_t n, int32_t whole, run *out) {
    const unit *units = held(p, ORDERED_UNITS);
    const int32_t *start = held(p, NODE_START), *first = held(p, NODE_FIRST);
    const int32_t *partial = held(p, NODE_PARTIAL), *unit_row = held(p, UNIT_ROW);
    int32_t size = in->page_size, tokens = in->node_tokens[n], pages = over(tokens, size);
    int32_t skip = whole * size, tail = tokens - (pages - 1) * size;
    for (int32_t u = first[n + 1]; u < first[n + 1] + partial[n + 1]; u++)
        *out++ = (run){n, in->node_page_indptr[n] + whole, start[n] + skip, pages - whole, tail, 1,
                       units[u].visible - start[n] - skip, unit_row[u], unit_row[u + 1]};
    return out;
}

static run own_rows(const unit *u, int32_t low, int32_t size) {
    int32_t pages = over(u->rows, size);
    return (run){-1, u->row, u->visible - 1, pages, u->rows - (pages - 1) * size, 1, 1, low, low + u->rows};
}

int within_window(const planner *p, run *one, int32_t page_size) {
    const int32_t *starts = held(p, STARTS);
    int32_t begin = starts[one->low], drop;
    for (int32_t row = one->low; row < one->high; row++) begin = least(begin, starts[row]);
    drop = begin > one->position ? (begin - one->position) / page_size : 0;
    if (drop >= one->pages) return 0;
    one->page += one->node < 0 ? drop * page_size : drop;
    one->pages -= drop;
    one->position += drop * page_size;
    one->seen -= drop * page_size;
    return 1;
}

static status find_runs(planner *p, const layout *in, int64_t units_count) {
    const unit *units = held(p, ORDERED_UNITS);
    const int32_t *unit_row = held(p, UNIT_ROW);
    int32_t *whole;
    int64_t count;
    run *runs, *out;
    TAKE(whole, NODE_WHOLE, in->nodes);
    count = count_runs(p, in, units_count, whole);
    if (count > INT32_MAX / (int64_t)sizeof(run)) return TOO_LARGE;
    TAKE(runs, RUNS, count);
    out = runs;
    for (int32_t n = 0; n < in->nodes; n++) out = emit_node(p, in, n, whole[n], out);
    for (int32_t n = 0; n < in->nodes; n++) out = emit_partial(p, in, n, whole[n], out);
    for (int64_t u = 0; u < units_count; u++)
        if (units[u].is_item) *out++ = own_rows(units + u, unit_row[u], in->page_size);
    p->size.runs = (int32_t)(out - runs);
    if (!p->size.windowed) return DONE;
    out = runs;
    for (int32_t r = 0; r < p->size.runs; r++) {
        run one = runs[r];
        if (within_window(p, &one, in->page_size)) *out++ = one;
    }
    p->size.runs = (int32_t)(out - runs);
    return DONE;
}

static status cut_tiles(planner *p, const settings *set) {
    const run *runs = held(p, RUNS);
    int32_t rows = p->size.rows, per_tile = TILE_ROWS / set->group, slack = most(1, per_tile / 4);
    int32_t *cuts, tiles = 0;
    int64_t *torn;
    TAKE(torn, TORN, (int64_t)rows + 2);
    TAKE(cuts, CUTS, (int64_t)rows + 2);
    memset(torn, 0, ((size_t)rows + 2) * sizeof *torn);
    for (int32_t r = 0; r < p->size.runs; r++) {
        if (runs[r].high - runs[r].low <= 1) continue;
        torn[runs[r].low + 1] += runs[r].pages;
        torn[runs[r].high] -= runs[r].pages;
    }
    for (int32_t row = 0; row <= rows; row++) torn[row + 1] += torn[row];
    cuts[0] = 0;
    while (rows - cuts[tiles] > per_tile) {
        int32_t latest = cuts[tiles] + per_tile, best = latest;
        for (int32_t cut = latest; cut > latest - slack; cut--)
            if (torn[cut] < torn[best]) best = cut;
        cuts[++tiles] = best;
    }
    cuts[++tiles] = rows;
    p->size.tiles = tiles;
    return DONE;
}

status plan_rows(planner *p, const layout *in, const settings *set) {
    int64_t units = 0;
    status found = check_layout(in);
    if (!found) found = find_starts(p, in);
    if (!found) found = find_units(p, in, &units);
    if (!found) found = order_units(p, in, units);
    if (found) return found;
    p->size.rows = in->segment_indptr[in->segments];
    p->size.windowed = set->window > 0 && p->size.rows > 0;
    if (!(found = lay_rows(p, set, units))) found = find_runs(p, in, units);
    return found ? found : cut_tiles(p, set);
}
