// The steps of a piece: scores, weights, and the weighted values.

DEVICE void scores(float (&s)[32], const u32 (&q)[DIM / 4], u32 keys) {
    u64 k = operand(keys, 16);
#pragma unroll
    for (int block = 0; block < DIM / 16; block++)
        product<0>(s, q + block * 4, k + (block / 4 * HALF_BYTES + block % 4 * 32 >> 4), block > 0);
}

DEVICE void add_values(float (&acc)[DIM / 2], const u32 (&p)[16], u32 values) {
    u64 v = operand(values, HALF_BYTES);
#pragma unroll
    for (int block = 0; block < STEP_TOKENS / 16; block++)
        product<1>(acc, p + block * 4, v + (block * 16 * 128 >> 4), 1);
}

// Steps of a piece, STEPS at a time: 1 of this warpgroup's ring, or one of each ring. The scores
// of the next steps are computed before the values of these are added.
template <int STEPS>
struct Walk {
    const Plan& plan;
    const Memory& memory;
    const Piece& piece;
    Rows& rows;
    int warp, group;
    float scale;
    Cursor<true> keys[STEPS];
    Cursor<false> values[STEPS];
    float s[STEPS][32];
    u32 p[STEPS][16];
    float fade[2];
    int4 mask, word;  // of one step

    DEVICE void release(int slot) {
        if (thread_number() % 32 == 0)
            barrier_arrive(memory.empty + slot * 8, STEPS == 2 ? RELEASES / 8 : RELEASES / 4);
    }

    // Waits for the keys of this turn and, if `with_values`, for the values of the last.
    DEVICE void wait(bool with_keys, bool with_values) {
        bool passed = true;
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            if (with_keys)
                passed &= barrier_passed(memory.full + keys[u].slot() * 8, keys[u].parity);
            if (with_values)
                passed &= barrier_passed(memory.full + values[u].slot() * 8, values[u].parity);
        }
        if (passed) return;
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            if (with_values) barrier_wait(memory.full + values[u].slot() * 8, values[u].parity);
            if (with_keys) barrier_wait(memory.full + keys[u].slot() * 8, keys[u].parity);
        }
    }

    DEVICE void begin_scores(const u32 (&q)[DIM / 4]) {
#pragma unroll
        for (int u = 0; u < STEPS; u++)
            scores(s[u], q, memory.slots + keys[u].slot() * OPERAND_BYTES);
        products_commit();
    }

    DEVICE void begin_values(float (&acc)[DIM / 2]) {
#pragma unroll
        for (int u = 0; u < STEPS; u++)
            add_values(acc, p[u], memory.slots + values[u].slot() * OPERAND_BYTES);
        products_commit();
    }

    DEVICE void release_keys() {
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            release(keys[u].slot());
            keys[u].advance();
        }
    }

    DEVICE void release_values() {
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            release(values[u].slot());
            values[u].advance();
        }
    }

    // Weights of one step in place of its scores; false if this warp's rows see nothing of it.
    DEVICE bool weigh_one() {
        u32 unseen = 0;
        fade[0] = fade[1] = 1;
        if (max(max(mask.x, mask.y), max(mask.z, mask.w)) >= MASKED) {
            if (!any_seen(mask, warp * 16)) return false;
            bool whole = true;
#pragma unroll
            for (int page = 0; page < PAGES; page++) {
                int one = entry(mask, page);
                whole &= (one & 0xFF0000) == PAGE << 16;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (!page_inside(one, rows.row + 8 * i)) unseen |= 1 << (4 * i + page);
            }
            if (!whole) hide(s[0], rows, mask, word, group);
        }
        weigh(s, rows, scale, fade, unseen);
        return true;
    }

    // The same of two shared steps; only the end of a wide node is not whole.
    DEVICE void weigh_shared(int turn) {
        if ((turn + 1) * STEPS >= piece.shared) {
#pragma unroll
            for (int u = 0; u < STEPS; u++) {
                int step = turn * STEPS + u;
                bool real = step < piece.shared;
                int4 masks = real ? plan.masks[piece.first + step] : int4{MASKED, 0, 0, 0};
                if (max(max(masks.x, masks.y), max(masks.z, masks.w)) >= MASKED)
                    hide(s[u], rows, masks, plan.words[piece.first + step], group);
            }
        }
        weigh(s, rows, scale, fade, 0);
    }

    DEVICE void pack(bool live) {
#pragma unroll
        for (int i = 0; i < 16 * STEPS; i++)
            p[i / 16][i % 16] =
                live ? packed(s[i / 16][2 * (i % 16)], s[i / 16][2 * (i % 16) + 1]) : 0;
    }

    DEVICE void fade_out(float (&acc)[DIM / 2]) {
        if (any_in_warp(fade[0] != 1 || fade[1] != 1)) {
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) acc[i] *= fade[i >> 1 & 1];
        }
    }

    // Steps `start` to `stop` of the piece.
    DEVICE void run(
        float (&acc)[DIM / 2], const u32 (&q)[DIM / 4], int start, int stop) {
        int turns = (stop - start + STEPS - 1) / STEPS;
        const int4 *masks = plan.masks + piece.first + start, *words = plan.words + piece.first + start;
        int4 next_mask, next_word;
        if (STEPS == 1) {
            mask = masks[0], word = words[0];
            next_mask = masks[1], next_word = words[1];  // the tables have a spare step
        }
        wait(true, false);
        products_begin();
        begin_scores(q);
        products_wait<0>();
        release_keys();
        bool live = true;
        if (STEPS == 1)
            live = weigh_one();
        else
            weigh_shared(0);
        fade_out(acc);
        pack(live);
        for (int turn = 1; turn < turns; turn++) {
            if (STEPS == 1) {
                mask = next_mask, word = next_word;
                next_mask = masks[turn + 1], next_word = words[turn + 1];
            }
            wait(true, true);
            products_begin();
            begin_scores(q);
            begin_values(acc);
            products_wait<1>();
            release_keys();
            if (STEPS == 1)
                live = weigh_one();
            else
                weigh_shared(turn);
            products_wait<0>();
            release_values();
            fade_out(acc);
            pack(live);
        }
        wait(false, true);
        products_begin();
        begin_values(acc);
        products_wait<0>();
        release_values();
    }
};
