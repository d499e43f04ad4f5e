// What a plan tells a block, and the warps that load the pages of its pieces.

struct Plan {
    const int* records;
    const int4* words;
    const int4* masks;
    int record_size;
    int bins;
    int heads;
    int kv_heads;
};

struct Memory {  // shared memory: slots of keys and values of both rings, and their barriers
    u32 slots;
    u32 full;
    u32 empty;
};

// Where in a ring a step's keys or values are.
template <bool KEYS>
struct Cursor {
    static constexpr int COUNT = KEYS ? KEY_SLOTS : VALUE_SLOTS;
    int ring, place, parity;

    DEVICE Cursor(int ring, int steps)
        : ring(ring), place(steps % COUNT), parity(steps / COUNT & 1) {}
    DEVICE int slot() const {
        return KEYS ? ring * COUNT + place : 2 * KEY_SLOTS + ring * COUNT + place;
    }
    DEVICE void advance() {
        place = place == COUNT - 1 ? 0 : place + 1;
        parity ^= place == 0;
    }
};

struct Bin {
    int head;
    int piece;  // first record, -1: none
};

DEVICE Bin bin_of(int side, const Plan& plan) {
    int block = block_number(), pairs = plan.bins / 2;
    // The heads of one piece run together: they share DRAM pages.
    if (block < pairs * plan.kv_heads)
        return Bin{block % plan.kv_heads, block / plan.kv_heads * 2 + side};
    int head = (block - pairs * plan.kv_heads) * 2 + side;  // the last bins of an odd number
    return Bin{head, head < plan.kv_heads ? plan.bins - 1 : -1};
}

struct Piece {
    const int* record;
    int steps;
    int first;
    int next;
    int shared;      // of its first steps, those that the other warpgroup's piece reads too
    int other_base;  // steps that the other ring holds before
};

DEVICE Piece piece_of(int number, const Plan& plan) {
    Piece piece;
    piece.record = plan.records + number * plan.record_size;
    piece.steps = piece.record[2];
    piece.first = piece.record[3];
    piece.next = piece.record[8];
    piece.shared = piece.record[9];
    piece.other_base = piece.record[10];
    return piece;
}

DEVICE void copy_step(
    u32 target, const TensorMap* pages, u32 barrier, int head, const int4& words) {
    barrier_expect(barrier, OPERAND_BYTES);
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        int word = entry(words, page), number = word & ((1 << PAGE_BITS) - 1);
        int absent = PAGE - (word >> PAGE_BITS & 127);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            copy_page(
                target + half * HALF_BYTES + page * PAGE * 128, pages, barrier, half * 64, head,
                -absent, number);
    }
}

// Fills the slots of a ring with keys, or with values.
template <bool KEYS>
DEVICE void produce(
    int side, const Bin& bin, const Memory& memory, const TensorMap* pages, const Plan& plan) {
    Cursor<KEYS> cursor(side, 0);
    for (int number = bin.piece; number >= 0;) {
        Piece piece = piece_of(number, plan);
        number = piece.next;
        int step = piece.shared ? side : 0;
        int4 word = {piece.record[RECORD], piece.record[RECORD + 1], piece.record[RECORD + 2],
                     piece.record[RECORD + 3]};
        if (step == 1 && piece.steps > 1) word = plan.words[piece.first + 1];
        int shared = (piece.shared + 1) / 2 * 2;  // an odd number ends with a step of no tokens
        while (step < piece.steps || step < shared) {
            int4 now = step < piece.steps ? word : int4{0, 0, 0, 0};
            step = step >= shared ? step + 1 : step + 2 < shared ? step + 2 : shared;
            if (step < piece.steps) word = plan.words[piece.first + step];
            int slot = cursor.slot();
            barrier_wait(memory.empty + slot * 8, cursor.parity ^ 1);
            if (is_elected())
                copy_step(
                    memory.slots + slot * OPERAND_BYTES, pages, memory.full + slot * 8, bin.head,
                    now);
            sync_warp();
            cursor.advance();
        }
    }
}
