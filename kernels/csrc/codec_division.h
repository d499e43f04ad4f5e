/* What the division of streams works on. */
#ifndef CODEC_DIVISION_H
#define CODEC_DIVISION_H

#include "codec_planner.h"

typedef struct { int64_t left; int32_t bin; } room;

typedef struct {
    const settings *set;
    const int32_t *region_step; /* [wide + tiles + 1] */
    const int32_t *wide_first, *wide_tiles; /* [wide] first tile of each region, tiles that read it */
    int32_t *wide_cuts; /* [wide] */
    int32_t bins, wide, tiles, longest_stream, limit, count;
    int64_t stream_total, wide_total; /* steps */
    piece *pieces, *other; /* [limit]; `low` of a wide region's pieces is -1 - region */
    room *room, *heap;     /* [bins] */
    int64_t *load;         /* [bins] */
    int32_t *order;        /* [tiles] */
    int32_t *bucket;       /* [longest_stream + 2] */
} divider;

void share(divider *d, int64_t rows);

#endif
