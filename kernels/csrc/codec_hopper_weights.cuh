// Rows of a tile in the threads of a warpgroup, and the weights that their scores give.
//
// In a product of 64 rows a thread has rows r and r + 8, and of each eight columns two.

constexpr int STEP_TOKENS = 64, PAGE = 16, PAGES = STEP_TOKENS / PAGE;
constexpr int HALVES = DIM / 64;                   // swizzled rows are 128 bytes: 64 elements
constexpr int HALF_BYTES = STEP_TOKENS * 128;      // 64 dimensions of a step's tokens
constexpr int OPERAND_BYTES = HALVES * HALF_BYTES; // K or V of a step
constexpr int KEY_SLOTS = RING_KEYS * 128 / DIM, VALUE_SLOTS = RING_VALUES * 128 / DIM;
constexpr int SLOTS = KEY_SLOTS + VALUE_SLOTS;
constexpr int THREADS = 384;                       // two consumer warpgroups, one of producers
constexpr int RELEASES = 8;                        // warps that release a slot both read
constexpr float NO_SCORE = -1e30f;                 // finite: a difference of two is no NaN
constexpr float LN2 = 0.6931471805599453f;
constexpr float SLACK = 8.0f;  // powers of two by which a score may exceed the row's reference

DEVICE float over_quad(float x, bool largest) {
#pragma unroll
    for (int lane = 1; lane <= 2; lane *= 2) {
        float other = from_lane_xor(x, lane);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// Lane i of each four gets the i-th values of all four, in the lanes' order.
DEVICE void transpose_quad(u32 (&v)[4]) {
    int lane = thread_number();
#pragma unroll
    for (int far = 1; far <= 2; far *= 2) {
        bool upper = lane & far;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & far) continue;
            u32 got = from_lane_xor(upper ? v[i] : v[i + far], far);
            (upper ? v[i] : v[i + far]) = got;
        }
    }
}

struct Rows {  // of a thread: row, row + 8 of its tile
    int row;
    int column;     // first of two columns of each block of 8
    int peers[2];   // row number in the layout's order within the tile: row / group
    float peak[2];  // reference that scores are taken against
    float total[2];
};

DEVICE int entry(const int4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

DEVICE bool page_inside(int mask, int row) {
    return (u32)(row - (mask & 255)) < (u32)((mask >> 8 & 255) - (mask & 255));
}

// Scores of tokens that a row does not see become -inf.
DEVICE void hide(
    float (&s)[32], const Rows& rows, const int4& masks, const int4& words, int group) {
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        int mask = entry(masks, page), seen = mask >> 16 & 127;
        bool causal = mask >> 23 & 1;
        int absent = PAGE - (entry(words, page) >> PAGE_BITS & 127);
        int first = causal ? (mask & 255) / group : 0;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int i = e >> 1 & 1;
            bool inside = page_inside(mask, rows.row + 8 * i);
            u32 limit = inside ? seen + (causal ? rows.peers[i] - first : 0) : 0;
            u32 at = rows.column + (e >> 2) * 8 + (e & 1) - absent;
            float& score = s[page * 8 + e];
            score = at < limit ? score : -infinity();
        }
    }
}

// Whether one of this warp's rows sees a token of the step.
DEVICE bool any_seen(const int4& masks, int warp_row) {
    bool any = false;
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        int mask = entry(masks, page);
        any |= (mask & 255) < warp_row + 16 && (mask >> 8 & 255) > warp_row;
    }
    return any;
}

// Weights in place of scores, 0 for the pages that a row does not see (bit 4 * i + page of
// `unseen`). Where a row's reference rises, what came before fades.
template <int STEPS>
DEVICE void weigh(
    float (&s)[STEPS][32], Rows& rows, float scale, float (&fade)[2], u32 unseen) {
    float some[2][4], peak[2];  // several chains of operations, which do not wait for each other
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int page = 0; page < 4 * STEPS; page++) {
            const float* of = &s[page / 4][page % 4 * 8 + 2 * i];
            float most = fmaxf(fmaxf(of[0], of[1]), fmaxf(of[4], of[5]));
            if (STEPS == 1) most = unseen >> 4 * i + page & 1 ? NO_SCORE : most;
            some[i][page % 4] = page < 4 ? most : fmaxf(some[i][page % 4], most);
        }
        peak[i] = fmaxf(fmaxf(some[i][0], some[i][1]), fmaxf(some[i][2], some[i][3]));
    }
    fade[0] = fade[1] = 1;
    bool rises = (peak[0] - rows.peak[0]) * scale > SLACK || (peak[1] - rows.peak[1]) * scale > SLACK;
    if (any_in_warp(rises)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Row by row, so that no row's rounding depends on the others of its warp.
            float higher = fmaxf(over_quad(peak[i], true), NO_SCORE);
            if ((higher - rows.peak[i]) * scale <= SLACK) higher = rows.peak[i];
            fade[i] = exp2_of((rows.peak[i] - higher) * scale);
            rows.peak[i] = higher;
            rows.total[i] *= fade[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float base = -rows.peak[i] * scale;
#pragma unroll
        for (int page = 0; page < 4 * STEPS; page++) {
            float of_page = base;
            if (STEPS == 1 && (unseen >> 4 * i + page & 1)) of_page = -infinity();
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& score = s[page / 4][page % 4 * 8 + 2 * i + (e >> 1) * 4 + (e & 1)];
                score = exp2_of(multiply_add(score, scale, of_page));
                some[i][e] = page == 0 ? score : some[i][e] + score;
            }
        }
        rows.total[i] += (some[i][0] + some[i][1]) + (some[i][2] + some[i][3]);
    }
}
