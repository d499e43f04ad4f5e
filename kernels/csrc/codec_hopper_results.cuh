// Results of pieces: of rows, or partial ones.

struct Output {
    void* partial_out;
    float* partial_lse;
    u16* out;
    float* lse;
    int partial_rows;
    float v_scale;
};

// Stores a row, of which each lane of four has two columns in eight; all lanes of a warp call it.
DEVICE void store_halves(
    const float (&acc)[DIM / 2], int i, float factor, u16* row, bool own) {
#pragma unroll
    for (int block = 0; block < DIM / 8; block += 4) {
        u32 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = packed(
                acc[(block + j) * 4 + 2 * i] * factor, acc[(block + j) * 4 + 2 * i + 1] * factor);
        transpose_quad(v);
        if (own)
            *(uint4*)(row + (block + thread_number() % 4) * 8) = uint4{v[0], v[1], v[2], v[3]};
    }
}

DEVICE void store_floats(
    const float (&acc)[DIM / 2], int i, float factor, float* row, bool own) {
#pragma unroll
    for (int block = 0; block < DIM / 8; block++)
        if (own)
            *(float2*)(row + block * 8 + thread_number() % 4 * 2) =
                float2{acc[block * 4 + 2 * i] * factor, acc[block * 4 + 2 * i + 1] * factor};
}

DEVICE void store_piece(
    const float (&acc)[DIM / 2], Rows& rows, const int* record, const int (&at)[2], int head,
    const Plan& plan, float scale, const Output& o) {
    int group = plan.heads / plan.kv_heads;
    int low = record[5], high = record[6], direct = record[7];
    long long partial = record[4] + (long long)head * o.partial_rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = over_quad(rows.total[i], false);
        int row = rows.row + 8 * i;
        bool own = row >= low && row < high, first = own && rows.column == 0;
        float log = total > 0 ? rows.peak[i] * scale + log2_of(total)
                              : -infinity();
        float factor = o.v_scale / fmaxf(total, 1e-30f);
        if (direct) {
            long long target = (long long)at[i] * plan.heads + head * group + row % group;
            store_halves(acc, i, factor, o.out + target * DIM, own);
            if (first) o.lse[target] = log * LN2;
        } else {
            long long target = partial + row;
            if (BF16)
                store_floats(acc, i, factor, (float*)o.partial_out + target * DIM, own);
            else
                store_halves(acc, i, factor, (u16*)o.partial_out + target * DIM, own);
            if (first) o.partial_lse[target] = log;
        }
    }
}
