// What Hopper has and C++ has not: barriers in shared memory, copies by tensor maps, warpgroups'
// matrix products. For 16-bit inputs; BF16 says which. Without any header.
//
// A file that is compiled after this one calls only what is here, so that it also runs where these
// functions are emulated.

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define CONSTANT __grid_constant__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    char bytes[128];
};

// ---- threads ----------------------------------------------------------------------------------

DEVICE int thread_number() { return threadIdx.x; }

DEVICE int block_number() { return blockIdx.x; }

// The compiler can tell that it is the same in a warp.
DEVICE int warp_number() { return __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0); }

DEVICE void sync_block() { __syncthreads(); }

DEVICE void sync_warp() { __syncwarp(); }

// Until `count` threads are here; `name` from 1 to 15.
DEVICE void sync_threads(int name, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory");
}

DEVICE bool any_in_warp(bool is) { return __any_sync(0xFFFFFFFF, is); }

template <typename T>
DEVICE T from_lane_xor(T value, int bits) { return __shfl_xor_sync(0xFFFFFFFF, value, bits); }

// One lane of a warp, as the compiler can tell.
__device__ __forceinline__ bool is_elected() {
    u32 is;
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, one;\n}\n"
        : "=r"(is));
    return is;
}

template <int COUNT>
DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

template <int COUNT>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- shared memory ----------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE u32 dynamic_memory() {
    extern __shared__ char bytes[];
    return shared_address(bytes);
}

template <int COUNT>
DEVICE u32 barrier_memory() {
    __shared__ u64 barriers[COUNT];
    return shared_address(barriers);
}

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni finished;\n"
        "bra.uni again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether it is passed, without waiting.
DEVICE bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}\n" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
}

DEVICE void barrier_arrive(u32 barrier, u32 count) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(barrier),
        "r"(count) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile(
        "{\n.reg .b64 state;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(barrier),
        "r"(bytes) : "memory");
}

DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// 16 tokens of 64 dimensions. Tokens before the page's first are zeros.
DEVICE void copy_page(
    u32 target, const TensorMap* map, u32 barrier, int dim, int head, int token, int page) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target), "l"((u64)map), "r"(barrier),
        "r"(dim), "r"(head), "r"(token), "r"(page) : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}

// ---- matrix products --------------------------------------------------------------------------

DEVICE void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Shared-memory operand in 128-byte swizzle: groups of 8 rows 1024 bytes apart; `lead` bytes
// between blocks of 64 elements where the operand is transposed.
DEVICE u64 operand(u32 address, u32 lead) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(lead >> 4) << 16 | (u64)(1024 >> 4) << 32 |
           (u64)1 << 62;
}

#if BF16
#define INPUT "bf16"
#else
#define INPUT "f16"
#endif
#define REG8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define LIST32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST64 \
    LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d[64 x 64] (+)= a[64 x 16] . b; b is K-major (TRANSPOSED 0) or N-major (1).
template <int TRANSPOSED>
DEVICE void product(float (&d)[32], const u32* a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." INPUT "." INPUT " {" LIST32 "}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : REG8(d, 0), REG8(d, 8), REG8(d, 16), REG8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
DEVICE void product(float (&d)[64], const u32* a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." INPUT "." INPUT " {" LIST64 "}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
        : REG8(d, 0), REG8(d, 8), REG8(d, 16), REG8(d, 24), REG8(d, 32), REG8(d, 40), REG8(d, 48),
          REG8(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}

// ---- numbers ----------------------------------------------------------------------------------

DEVICE float infinity() { return __int_as_float(0x7F800000); }

DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

DEVICE u32 packed(float low, float high) {
    u32 pair;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- memory ahead of its use ------------------------------------------------------------------

DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }
