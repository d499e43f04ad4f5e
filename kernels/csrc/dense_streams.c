/* Where each segment's keys lie; see dense/streams.py, and row_tables of dense/tiles.py. */
#include <stdlib.h>
#include <string.h>

#include "dense_planner.h"

static status check(const layout *in) {
    if (in->nodes < 0 || in->segments < 0 || in->page_size < 1) return BAD_LAYOUT;
    if (in->indptr[0] != 0 || in->indptr[in->nodes] != in->num_pages) return BAD_LAYOUT;
    for (int32_t n = 0; n < in->nodes; n++) {
        int64_t pages = (int64_t)in->indptr[n + 1] - in->indptr[n];
        if (in->parent[n] < -1 || in->parent[n] >= n || in->tokens[n] < 0) return BAD_LAYOUT;
        if (pages < 0 || pages * in->page_size < in->tokens[n]) return BAD_LAYOUT;
    }
    if (in->segment_indptr[0] != 0) return BAD_LAYOUT;
    for (int32_t s = 0; s < in->segments; s++) {
        if (in->segment_indptr[s + 1] < in->segment_indptr[s]) return BAD_LAYOUT;
        if (in->segment_node[s] < -1 || in->segment_node[s] >= in->nodes) return BAD_LAYOUT;
    }
    return DONE;
}

/* Rows at the end of a segment that see each other as rows, before anything is stored. */
static int32_t own_rows(int32_t rows, int32_t chain, int is_item) {
    if (is_item) return rows;
    return rows >= LEAST_FRESH_ROWS || rows >= chain ? least(rows, chain) : 0;
}

/* By node: from which token on its tokens are rows of the step, and the row of that token. */
static void mark_fresh(dense *d, const int32_t *node_start, int32_t segment, int32_t begin,
                       int32_t first_row) {
    const layout *in = d->in;
    int32_t *low_of = held(d, NODE_LOW), *row_of = held(d, NODE_ROW);
    for (int32_t n = in->segment_node[segment]; n >= 0; n = in->parent[n]) {
        int32_t start = node_start[n], tokens = in->tokens[n], low = most(begin - start, 0);
        if (low >= tokens && tokens) break;
        if (tokens && low < low_of[n]) {
            low_of[n] = low;
            row_of[n] = first_row + start + low - begin;
        }
    }
}

static status read_segments(dense *d) {
    const layout *in = d->in;
    int32_t *start, *low_of, *row_of, *chain, *own, *stream;
    member *members;
    TAKE(start, NODE_START, in->nodes);
    TAKE(low_of, NODE_LOW, in->nodes);
    TAKE(row_of, NODE_ROW, in->nodes);
    TAKE(chain, CHAIN, in->segments);
    TAKE(own, SEGMENT_OWN, in->segments);
    TAKE(stream, SEGMENT_STREAM, in->segments);
    TAKE(members, MEMBERS, in->segments);
    for (int32_t n = 0; n < in->nodes; n++) {
        int32_t up = in->parent[n];
        start[n] = up < 0 ? 0 : start[up] + in->tokens[up];
        low_of[n] = in->tokens[n];
        row_of[n] = -1;
    }
    d->streams = 0; /* members, for now */
    for (int32_t s = 0; s < in->segments; s++) {
        int32_t node = in->segment_node[s], last = in->segment_indptr[s + 1];
        int32_t rows = last - in->segment_indptr[s], read;
        chain[s] = node < 0 ? 0 : start[node] + in->tokens[node];
        own[s] = own_rows(rows, chain[s], in->is_item[s]);
        stream[s] = -1;
        if (!in->is_item[s] && own[s]) mark_fresh(d, start, s, chain[s] - own[s], last - own[s]);
        read = in->is_item[s] ? chain[s] : chain[s] - own[s];
        if (rows) {
            member one = {-1, read > 0 ? node : -1, read, s};
            members[d->streams++] = one;
        }
    }
    return DONE;
}

static int by_read(const void *left, const void *right) {
    const member *a = left, *b = right;
    if (a->node != b->node) return a->node < b->node ? -1 : 1;
    if (a->read != b->read) return a->read < b->read ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

static int32_t depth(const layout *in, int32_t node) {
    int32_t found = 0;
    for (; node >= 0; node = in->parent[node]) found++;
    return found;
}

/* Tokens of the first `tokens` of a node's chain, root first, in pages or among the rows. */
static piece *put_pieces(const dense *d, int32_t node, int32_t tokens, piece *to) {
    const layout *in = d->in;
    const int32_t *start = held(d, NODE_START), *low_of = held(d, NODE_LOW);
    const int32_t *row_of = held(d, NODE_ROW);
    piece *end = to + 2 * depth(in, node), *at = end;
    for (int32_t n = node; n >= 0; n = in->parent[n]) { /* from the end backwards */
        int32_t has = least(in->tokens[n], tokens - start[n]);
        int32_t low = row_of[n] >= 0 ? low_of[n] : has;
        if (has > low) *--at = (piece){n, low, has, row_of[n]};
        if (has > 0 && low > 0) *--at = (piece){n, 0, least(low, has), -1};
    }
    memmove(to, at, (size_t)(end - at) * sizeof *to);
    return to + (end - at);
}

static status make_streams(dense *d) {
    member *members = held(d, MEMBERS);
    int32_t count = d->streams, streams = 0, *stream = held(d, SEGMENT_STREAM);
    int32_t *first, *tokens;
    int64_t room = 0;
    piece *pieces, *at;
    qsort(members, (size_t)count, sizeof *members, by_read);
    for (int32_t m = 0; m < count; m++) {
        int fresh = !m || members[m].node != members[m - 1].node
                    || members[m].read != members[m - 1].read;
        if (fresh) room += 2 * depth(d->in, members[m].node);
        streams += fresh;
        stream[members[m].order] = members[m].stream = streams - 1;
    }
    d->streams = streams;
    TAKE(first, STREAM_FIRST, (int64_t)streams + 1);
    TAKE(tokens, STREAM_TOKENS, streams);
    TAKE(pieces, PIECES, room);
    at = pieces;
    for (int32_t m = 0; m < count; m++) {
        int32_t s = members[m].stream;
        if (m && members[m - 1].stream == s) continue;
        first[s] = (int32_t)(at - pieces);
        tokens[s] = 0;
        at = put_pieces(d, members[m].node, members[m].node < 0 ? 0 : members[m].read, at);
        for (const piece *p = pieces + first[s]; p < at; p++) tokens[s] += p->high - p->low;
    }
    first[streams] = (int32_t)(at - pieces);
    return DONE;
}

typedef struct { int32_t tokens, stream; } length;

static int longest_first(const void *left, const void *right) {
    const length *a = left, *b = right;
    if (a->tokens != b->tokens) return a->tokens > b->tokens ? -1 : 1;
    return a->stream < b->stream ? -1 : 1;
}

/* Places of the nodes in the copy; what the same streams read together lies together. */
static status place_copies(dense *d) {
    const layout *in = d->in;
    const int32_t *first = held(d, STREAM_FIRST), *tokens = held(d, STREAM_TOKENS);
    const piece *pieces = held(d, PIECES);
    int32_t *readers, *place, *high, *sources;
    int64_t size = 0;
    length *order;
    TAKE(readers, NODE_READERS, in->nodes);
    TAKE(place, NODE_PLACE, in->nodes);
    TAKE(high, NODE_HIGH, in->nodes);
    TAKE(order, STREAM_ORDER, d->streams);
    for (int32_t n = 0; n < in->nodes; n++) readers[n] = 0, place[n] = -1;
    for (int32_t p = 0; p < first[d->streams]; p++) readers[pieces[p].node] += pieces[p].row < 0;
    for (int32_t s = 0; s < d->streams; s++) order[s] = (length){tokens[s], s};
    qsort(order, (size_t)d->streams, sizeof *order, longest_first);
    for (int32_t o = 0; o < d->streams; o++) {
        int32_t above = -1, s = order[o].stream;
        for (const piece *p = pieces + first[s]; p < pieces + first[s + 1]; p++) {
            if (p->row >= 0) {
                above = -1;
                continue;
            }
            if (place[p->node] < 0) {
                int joins = above >= 0 && readers[above] == readers[p->node];
                if (!joins) size = (size + BLOCK - 1) / BLOCK * BLOCK;
                if (size + p->high > INT32_MAX / 2) return TOO_LARGE;
                place[p->node] = (int32_t)size;
                high[p->node] = p->high;
                size += p->high;
            }
            above = p->node;
        }
    }
    size = (size + BLOCK - 1) / BLOCK * BLOCK;
    d->size.sources = (int32_t)size;
    TAKE(sources, SOURCES, size);
    for (int64_t t = 0; t < size; t++) sources[t] = EMPTY;
    for (int32_t n = 0; n < in->nodes; n++) {
        if (place[n] < 0) continue;
        for (int32_t t = 0; t < high[n]; t++) {
            int32_t page = in->pages[in->indptr[n] + t / in->page_size];
            sources[place[n] + t] = page * in->page_size + t % in->page_size;
        }
    }
    return DONE;
}

/* Pieces that follow each other in memory as one; STREAM_FIRST then counts stretches. */
static status join_pieces(dense *d) {
    const int32_t *place = held(d, NODE_PLACE), *start = held(d, NODE_START);
    const piece *pieces = held(d, PIECES);
    int32_t *first = held(d, STREAM_FIRST), begin = 0, count = 0;
    stretch *found;
    TAKE(found, STRETCHES, first[d->streams]);
    for (int32_t s = 0; s < d->streams; s++) {
        int32_t end = first[s + 1], opened = count;
        for (int32_t p = begin; p < end; p++) {
            piece one = pieces[p];
            int32_t copied = one.row < 0, at = copied ? place[one.node] : one.row;
            stretch *last = found + count - 1;
            if (count > opened && last->copied == copied && last->start + last->tokens == at) {
                last->tokens += one.high - one.low;
                continue;
            }
            found[count++] = (stretch){copied, at, one.high - one.low, start[one.node] + one.low};
        }
        begin = end;
        first[s] = opened;
    }
    first[d->streams] = count;
    return DONE;
}

static status plan_rows(dense *d) {
    const layout *in = d->in;
    const int32_t *chain = held(d, CHAIN), *own = held(d, SEGMENT_OWN);
    const int32_t *stream = held(d, SEGMENT_STREAM);
    int32_t *first, *seen, *lowest;
    TAKE(first, FIRST, d->rows);
    TAKE(seen, SEEN, d->rows);
    TAKE(lowest, STREAM_LEAST, d->streams);
    for (int32_t s = 0; s < d->streams; s++) lowest[s] = INT32_MAX;
    for (int32_t s = 0; s < in->segments; s++) {
        int32_t begin = in->segment_indptr[s], stop = in->segment_indptr[s + 1];
        int32_t fixed = chain[s] - (in->is_item[s] ? 0 : own[s]);
        for (int32_t row = begin; row < stop; row++) {
            first[row] = own[s] ? stop - own[s] : row + 1;
            seen[row] = own[s] ? fixed : most(chain[s] - stop + 1 + row, 0);
        }
        if (stop > begin) lowest[stream[s]] = least(lowest[stream[s]], seen[begin]);
    }
    return DONE;
}

status plan_streams(dense *d) {
    status found = check(d->in);
    d->rows = found ? 0 : d->in->segment_indptr[d->in->segments];
    if (!found) found = read_segments(d);
    if (!found) found = make_streams(d);
    if (!found) found = place_copies(d);
    if (!found) found = join_pieces(d);
    if (!found) found = plan_rows(d);
    d->size.rows = d->rows;
    return found;
}
