// Entry of the emulated kernel: the arguments of `tree_kernel`, with tensors in place of maps.
struct Arguments {  // as in codec/hopper.py
    const u16* q;
    const int* records;
    const int4 *words, *masks;
    void* partial_out;
    float* partial_lse;
    u16* out;
    float* lse;
    int q_stride, partial_rows, record_size, bins, heads, kv_heads;
    float scale, v_scale;
};

struct Tensor {
    const u16* base;
    int64_t sizes[4], strides[4];
};

static TensorMap map_of(const Tensor& tensor) {
    TensorMap map;
    map.base = tensor.base;
    memcpy(map.sizes, tensor.sizes, sizeof map.sizes);
    memcpy(map.strides, tensor.strides, sizeof map.strides);
    return map;
}

extern "C" bool run_tree_kernel(
    int blocks, const Tensor* k_pages, const Tensor* v_pages, const Arguments* a) {
    return run_blocks(blocks, THREADS, [&] {
        tree_kernel(
            map_of(*k_pages), map_of(*v_pages), a->q, a->records, a->words, a->masks,
            a->partial_out, a->partial_lse, a->out, a->lse, a->q_stride, a->partial_rows,
            a->record_size, a->bins, a->heads, a->kv_heads, a->scale, a->v_scale);
    });
}
