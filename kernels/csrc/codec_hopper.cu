// Tree decode for Hopper: what `tree_kernel` of kernels_triton.py does, for 16-bit heads of 64 or 128.
//
// A block has two consumer warpgroups, each with a bin of the plan, a ring of slots for the steps'
// keys and values, and two warps that fill it; one's products run under the other's softmax. Where
// a piece of both begins with the same steps (for two tiles of rows), the rings are one: a slot is
// read by both warpgroups. codec/pairs.py puts such bins together.
//
// One block a multiprocessor. Compiled after the .cuh files, with DIM, BF16 and the constants of
// the plan's tables defined.

// Begins to load a piece's queries: of each row, 16 bytes where a product takes four times 4.
DEVICE void begin_queries(
    u32 (&q)[DIM / 4], int (&at)[2], const Piece& piece, const Rows& rows, const u16* q_rows,
    int q_stride, int first_head, int group) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        at[i] = piece.record[RECORD + 2 * PAGES + rows.peers[i]];
        const u16* source =
            q_rows + (long long)at[i] * q_stride + (first_head + (rows.row + 8 * i) % group) * DIM;
#pragma unroll
        for (int block = 0; block < DIM / 8; block += 4) {
            uint4 loaded = *(const uint4*)(source + (block + thread_number() % 4) * 8);
            q[block * 2 + i] = loaded.x;
            q[block * 2 + 2 + i] = loaded.y;
            q[block * 2 + 4 + i] = loaded.z;
            q[block * 2 + 6 + i] = loaded.w;
        }
    }
}

DEVICE void finish_queries(u32 (&q)[DIM / 4]) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int block = 0; block < DIM / 8; block += 4) {
            u32 v[4] = {q[block * 2 + i], q[block * 2 + 2 + i], q[block * 2 + 4 + i],
                        q[block * 2 + 6 + i]};
            transpose_quad(v);
#pragma unroll
            for (int j = 0; j < 4; j++) q[block * 2 + 2 * j + i] = v[j];
        }
}

DEVICE void consume(
    int side, const Bin& bin, const Memory& memory, const u16* q_rows, int q_stride,
    const Plan& plan, float scale, const Output& output) {
    int warp = warp_number() % 4, lane = thread_number() % 32;
    int group = plan.heads / plan.kv_heads, base = 0, at[2];
    Rows rows;
    rows.row = warp * 16 + lane / 4;
    rows.column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) rows.peers[i] = (rows.row + 8 * i) / group;
    u32 q[DIM / 4];
    if (bin.piece < 0) return;
    Piece piece = piece_of(bin.piece, plan);
    if (piece.steps == 0) return;
    begin_queries(q, at, piece, rows, q_rows, q_stride, bin.head * group, group);
    for (;;) {
        const int* following = plan.records + piece.next * plan.record_size;
        if (piece.next >= 0) prefetch(following + lane % 2 * 32);
        finish_queries(q);
        float acc[DIM / 2];
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) acc[i] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows.peak[i] = NO_SCORE;
            rows.total[i] = 0;
        }
        if (piece.shared) {
            // Until both are here, the other ring may be more than a round behind.
            sync_threads(1, 256);
            int bases[2] = {side ? piece.other_base : base, side ? base : piece.other_base};
            Walk<2> walk{plan, memory, piece, rows, warp, group, scale,
                         {{0, bases[0]}, {1, bases[1]}}, {{0, bases[0]}, {1, bases[1]}}};
            walk.run(acc, q, 0, piece.shared);
            base += (piece.shared + 1) / 2;
        }
        if (piece.shared < piece.steps) {
            Walk<1> walk{plan, memory, piece, rows, warp, group, scale, {{side, base}},
                         {{side, base}}};
            walk.run(acc, q, piece.shared, piece.steps);
            base += piece.steps - piece.shared;
        }
        Piece last = piece;
        int last_at[2] = {at[0], at[1]};
        if (last.next >= 0) {  // its queries come while this one's results go
            piece = piece_of(last.next, plan);
            begin_queries(q, at, piece, rows, q_rows, q_stride, bin.head * group, group);
        }
        store_piece(acc, rows, last.record, last_at, bin.head, plan, scale, output);
        if (last.next < 0) return;
    }
}

KERNEL void __launch_bounds__(THREADS, 1) tree_kernel(
    const CONSTANT TensorMap k_pages, const CONSTANT TensorMap v_pages, const u16* q,
    const int* records, const int4* words, const int4* masks, void* partial_out,
    float* partial_lse, u16* out, float* lse, int q_stride, int partial_rows, int record_size,
    int bins, int heads, int kv_heads, float scale, float v_scale) {
    Memory memory;
    memory.slots = (dynamic_memory() + 1023) & ~1023u;
    memory.full = barrier_memory<4 * SLOTS>();
    memory.empty = memory.full + 2 * SLOTS * 8;
    int warp = warp_number();
    if (thread_number() == 32) {
        prefetch_map(&k_pages);
        prefetch_map(&v_pages);
    }
    if (thread_number() == 0) {
        for (int slot = 0; slot < 2 * SLOTS; slot++) {
            barrier_init(memory.full + slot * 8, 1);
            barrier_init(memory.empty + slot * 8, RELEASES);
        }
        barriers_ready();
    }
    sync_block();
    Plan plan = {records, words, masks, record_size, bins, heads, kv_heads};
    int side = warp < 8 ? warp / 4 : warp & 1;
    Bin bin = bin_of(side, plan);
    if (warp >= 8) {
        keep_registers<40>();
        if (warp < 10)
            produce<true>(side, bin, memory, &k_pages, plan);
        else
            produce<false>(side, bin, memory, &v_pages, plan);
    } else {
        take_registers<232>();
        Output output = {partial_out, partial_lse, out, lse, partial_rows, v_scale};
        consume(side, bin, memory, q, q_stride, plan, scale, output);
    }
}
