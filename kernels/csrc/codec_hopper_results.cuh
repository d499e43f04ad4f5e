// Results of pieces, and the merge of those that are parts of a row's.

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

struct Merge {
    const int* rows;    // [count] where each row goes
    const int* counts;  // [count] partial results of each, -1: written already
    const int* table;   // [count, columns]
    int columns;        // at most 64
    int count;          // rows; 0: no merge here
    u64* arrivals;      // [kv_heads] warpgroups that have finished, over all launches
};

DEVICE float over_warp(float x, bool largest) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) {
        float other = from_lane_xor(x, lane);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// Waits until all bins of the head have stored their partial results. All blocks run at once.
DEVICE void wait_for_head(int side, u64* arrivals, int bins) {
    publish();
    sync_threads(2 + side, 128);
    if (thread_number() % 128 == 0)
        wait_for_count(arrivals, (add_and_get(arrivals) / bins + 1) * bins);
    sync_threads(2 + side, 128);
}

// DIM / 32 neighbouring columns of a partial result.
DEVICE void load_part(float (&v)[DIM / 32], const void* parts, long long row) {
    long long at = row * DIM + thread_number() % 32 * (DIM / 32);
#if BF16 && DIM == 128
    float4 four = load_fresh((const float4*)((const float*)parts + at));
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
#elif BF16
    float2 two = load_fresh((const float2*)((const float*)parts + at));
    v[0] = two.x, v[1] = two.y;
#elif DIM == 128
    uint2 pairs = load_fresh((const uint2*)((const u16*)parts + at));
    unpack_halves(v[0], v[1], pairs.x);
    unpack_halves(v[2], v[3], pairs.y);
#else
    unpack_halves(v[0], v[1], load_fresh((const u32*)((const u16*)parts + at)));
#endif
}

// Each warp merges the partial results of some rows and query heads.
DEVICE void merge_rows(
    int side, const Bin& bin, const Merge& merge, const Plan& plan, const Output& o) {
    constexpr int BATCH = 8;
    int warp = warp_number() % 4, lane = thread_number() % 32;
    int group = plan.heads / plan.kv_heads;
    bool waited = false;
    for (int task = bin.piece * 4 + warp;; task += plan.bins * 4) {
        bool real = task < merge.count * group;
        int row = real ? task / group : 0, own = real ? task % group : 0;
        int count = real ? merge.counts[row] : -1, to = merge.rows[row], entries[2];
        const int* table = merge.table + row * merge.columns;
#pragma unroll
        for (int i = 0; i < 2; i++)
            entries[i] = 32 * i + lane < count ? table[32 * i + lane] : -1;
        if (!waited) wait_for_head(side, merge.arrivals + bin.head, plan.bins);
        waited = true;
        if (!real) return;
        if (count < 0) continue;
        long long base = (long long)bin.head * o.partial_rows + own;
        float logs[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            logs[i] = -infinity();
            if (entries[i] >= 0) logs[i] = load_fresh(o.partial_lse + base + entries[i]);
        }
        float peak = fmaxf(over_warp(fmaxf(logs[0], logs[1]), true), NO_SCORE);
        float weights[2] = {exp2_of(logs[0] - peak), exp2_of(logs[1] - peak)};
        float total = over_warp(weights[0] + weights[1], false), sum[DIM / 32];
#pragma unroll
        for (int d = 0; d < DIM / 32; d++) sum[d] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int first = 32 * i; first < count && first < 32 * i + 32; first += BATCH) {
                float parts[BATCH][DIM / 32];
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    int entry = from_lane(entries[i], (first + j) % 32);
#pragma unroll
                    for (int d = 0; d < DIM / 32; d++) parts[j][d] = 0;
                    if (entry >= 0) load_part(parts[j], o.partial_out, base + entry);
                }
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    float weight = from_lane(weights[i], (first + j) % 32);
#pragma unroll
                    for (int d = 0; d < DIM / 32; d++) sum[d] += parts[j][d] * weight;
                }
            }
        }
        float factor = 1.0f / fmaxf(total, 1e-30f);
        long long target = (long long)to * plan.heads + bin.head * group + own;
        u32* out = (u32*)(o.out + target * DIM + lane * (DIM / 32));
#pragma unroll
        for (int d = 0; d < DIM / 64; d++)
            out[d] = packed(sum[2 * d] * factor, sum[2 * d + 1] * factor);
        if (lane == 0)
            o.lse[target] = total > 0 ? (peak + log2_of(total)) * LN2
                                      : -infinity();
    }
}
