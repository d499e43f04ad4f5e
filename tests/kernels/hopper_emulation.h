// The functions of hopper.cuh on a CPU: each thread of each block is a fiber, which runs until it
// has to wait for others. Copies and products are done at once. Where nobody can go on, the run
// ends with an error: the threads wait for each other.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define DEVICE inline
#define KERNEL static
#define CONSTANT
#define __launch_bounds__(threads, blocks)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
using std::max;

struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

struct alignas(64) TensorMap {
    const u16* base;
    int64_t sizes[4], strides[4];  // in elements, from the last dimension to the first
};

struct Gathering {  // of some threads, who leave values for each other
    int arrived = 0;
    u64 times = 0;
    u32 given[128][4], seen[128][4];
};

struct Barrier { int count, pending; int64_t bytes; u32 phase; };

struct Block {
    int number;
    std::vector<unsigned char> memory = std::vector<unsigned char>(232448);
    std::map<u32, Barrier> barriers;
    Gathering all, warps[12], named[16];
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    Block* block;
    int thread;
    bool done = false;
};

static Fiber* self;
static ucontext_t scheduler;
static u64 changes;  // of what fibers wait for
static std::function<void()> body;

template <typename Condition>
static void wait_until(Condition is_true) {
    while (!is_true()) swapcontext(&self->context, &scheduler);
}

static void gather(Gathering& g, int place, int count, const u32 (&value)[4]) {
    u64 times = g.times;
    memcpy(g.given[place], value, sizeof value);
    if (++g.arrived == count) {
        memcpy(g.seen, g.given, sizeof g.seen);
        g.arrived = 0;
        g.times++;
        changes++;
    } else {
        wait_until([&] { return g.times != times; });
    }
}

static void start_fiber() {
    body();
    self->done = true;
    changes++;
    swapcontext(&self->context, &scheduler);
}

static bool run_blocks(int blocks, int threads, std::function<void()> kernel) {
    std::vector<std::unique_ptr<Block>> made;
    std::vector<std::unique_ptr<Fiber>> fibers;
    body = kernel;
    for (int b = 0; b < blocks; b++) {
        made.push_back(std::make_unique<Block>());
        made.back()->number = b;
        for (int t = 0; t < threads; t++) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber* f = fibers.back().get();
            f->block = made.back().get();
            f->thread = t;
            getcontext(&f->context);
            f->context.uc_stack.ss_sp = f->stack.data();
            f->context.uc_stack.ss_size = f->stack.size();
            makecontext(&f->context, start_fiber, 0);
        }
    }
    for (;;) {
        u64 before = changes;
        bool running = false;
        for (auto& f : fibers)
            if (!f->done) {
                running = true;
                self = f.get();
                swapcontext(&scheduler, &f->context);
            }
        if (!running) return true;
        if (changes == before) return false;
    }
}

// ---- threads
DEVICE int thread_number() { return self->thread; }
DEVICE int block_number() { return self->block->number; }
DEVICE int warp_number() { return self->thread / 32; }
DEVICE void sync_block() { gather(self->block->all, 0, 384, {}); }
DEVICE void sync_warp() { gather(self->block->warps[warp_number()], self->thread % 32, 32, {}); }
DEVICE void sync_threads(int name, int count) { gather(self->block->named[name], 0, count, {}); }

template <typename T>
static T exchanged(T value, int lane) {
    u32 bits[4] = {};
    Gathering& g = self->block->warps[warp_number()];
    memcpy(bits, &value, sizeof value);
    gather(g, self->thread % 32, 32, bits);
    memcpy(&value, g.seen[lane], sizeof value);
    return value;
}

template <typename T>
DEVICE T from_lane_xor(T value, int bits) { return exchanged(value, self->thread % 32 ^ bits); }

DEVICE bool any_in_warp(bool is) {
    bool any = false;
    exchanged<int>(is, 0);
    for (int lane = 0; lane < 32; lane++) any |= self->block->warps[warp_number()].seen[lane][0];
    return any;
}

DEVICE bool is_elected() { return self->thread % 32 == 0; }
template <int COUNT> DEVICE void keep_registers() {}
template <int COUNT> DEVICE void take_registers() {}

// ---- shared memory
DEVICE u32 dynamic_memory() { return 512; }
template <int COUNT> DEVICE u32 barrier_memory() { return 1 << 20; }
DEVICE void barrier_init(u32 at, u32 count) {
    self->block->barriers[at] = Barrier{(int)count, (int)count, 0, 0};
}
DEVICE void barriers_ready() {}
DEVICE bool barrier_passed(u32 at, u32 parity) {
    return (self->block->barriers.at(at).phase & 1) != parity;
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    wait_until([=] { return barrier_passed(at, parity); });
}
static void finish_phase(Barrier& b) {
    if (b.pending < 0) abort();
    if (b.pending || b.bytes) return;
    b.pending = b.count;
    b.phase++;
    changes++;
}
DEVICE void barrier_arrive(u32 at, u32 count) {
    Barrier& b = self->block->barriers.at(at);
    b.pending -= count;
    finish_phase(b);
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    Barrier& b = self->block->barriers.at(at);
    b.bytes += bytes;
    b.pending--;
    finish_phase(b);
}
static u16& swizzled(u32 address) {
    address ^= (address >> 7 & 7) << 4;
    return *(u16*)(self->block->memory.data() + address);
}
DEVICE void prefetch_map(const TensorMap*) {}
DEVICE void copy_page(
    u32 target, const TensorMap* map, u32 barrier, int dim, int head, int token, int page) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 64; column++) {
            int64_t at[4] = {dim + column, head, token + row, page};
            bool inside = true;
            const u16* from = map->base;
            for (int d = 0; d < 4; d++) {
                inside &= at[d] >= 0 && at[d] < map->sizes[d];
                from += at[d] * map->strides[d];
            }
            swizzled(target + row * 128 + column * 2) = inside ? *from : 0;
        }
    Barrier& b = self->block->barriers.at(barrier);
    b.bytes -= 2048;
    finish_phase(b);
}

// ---- numbers
DEVICE float infinity() { return INFINITY; }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float log2_of(float x) { return log2f(x); }
static float widened(u16 bits) {
#if BF16
    u32 wide = (u32)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
#else
    _Float16 half;
    memcpy(&half, &bits, 2);
    return half;
#endif
}
static u16 narrowed(float value) {
#if BF16
    u32 bits;
    memcpy(&bits, &value, 4);
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#else
    _Float16 half = (_Float16)value;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
#endif
}
DEVICE u32 packed(float low, float high) { return narrowed(low) | (u32)narrowed(high) << 16; }
DEVICE void unpack_halves(float& low, float& high, u32 pair) {
    low = widened((u16)pair);
    high = widened((u16)(pair >> 16));
}

// ---- products
DEVICE void products_begin() { sync_threads(14 + self->thread / 128, 128); }
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() {}
DEVICE u64 operand(u32 address, u32 lead) {
    return (u64)(address >> 4) | (u64)(lead >> 4) << 16 | (u64)64 << 32;
}
template <int TRANSPOSED, int COUNT>
DEVICE void product(float (&d)[COUNT], const u32* a, u64 b, int add) {
    Gathering& g = self->block->warps[warp_number()];
    int lane = self->thread % 32;
    u32 start = (b & 0xFFFF) << 4, lead = (b >> 16 & 0xFFFF) << 4, stride = (b >> 32 & 0xFFFF) << 4;
    u32 values[4] = {a[0], a[1], a[2], a[3]};
    float rows[2][16];
    gather(g, lane, 32, values);
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 4; i++) {
            float* to = &rows[i % 2][i / 2 * 8 + c * 2];
            unpack_halves(to[0], to[1], g.seen[lane / 4 * 4 + c][i]);
        }
    for (int e = 0; e < COUNT; e++) {
        int n = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float sum = add ? d[e] : 0;
        for (int k = 0; k < 16; k++) {
            u32 at = TRANSPOSED ? k / 8 * stride + k % 8 * 128 + n / 64 * lead + n % 64 * 2
                                : n / 8 * stride + n % 8 * 128 + k * 2;
            sum += rows[e / 2 % 2][k] * widened(swizzled(start + at));
        }
        d[e] = sum;
    }
}

DEVICE void prefetch(const void*) {}
