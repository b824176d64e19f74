// What all kinds of layers share: the model's shape, memory, how products are divided, and the network after attention.
// Knows nothing of phases.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "attention.hpp"
#include "kernels.hpp"

namespace baton {

struct Shape {
    int32_t layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, blocks, block_size, is_bf16;
    // How many pairs of dimensions of a head turn with the time and the height of a row; the rest turn with its width.
    int32_t time_pairs, height_pairs;
    // Experts of a sparse layer, of which a row uses some; the width of one, and of the shared one or 0; whether the
    // shares of a row's experts add up to 1; the slots that experts lie in, divided over ranks. 0 in a dense model.
    int32_t experts, experts_per_token, expert_ffn, shared_ffn, normalised, slots, ranks;
    float eps;
};

// A buffer that only grows; what it held is lost when it does.
template <class T>
class Buffer {
public:
    T* reserve(size_t count) {
        if (count > size_) {
            data_.reset();
            size_ = 0;
            data_.reset(new (std::align_val_t(64)) T[count]());
            size_ = count;
        }
        return data_.get();
    }
    T* get() const { return data_.get(); }
    T& operator[](size_t index) const { return data_[index]; }

private:
    struct Free {
        void operator()(T* data) const { operator delete[](data, std::align_val_t(64)); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

// Rows of a power of two bytes would all fall into the same few lines of the cache.
static inline size_t pitch_of(int width) { return (size_t(width) + 31) / 32 * 32 + 32; }

// In a sparse layer, which has a router, `gate_up` and `down` are the shared expert's, if there is one.
template <class W>
struct Layer {
    const W *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *down;
    const W *router, *expert_gate_up, *expert_down, *shared_gate;
    int sparse = -1;  // Its index among the sparse layers.
};

// What one thread works with.
template <class W>
struct alignas(64) Scratch {
    using A = typename Input<W>::type;
    int block = 0;  // whose rows are in `inputs`
    Buffer<A> inputs, packed, turned;
    Buffer<float> out, mixed, more, wide;
    Buffer<Softmax> sums;
    Buffer<const W*> keys, values;
};

// The items of a product: rows of inputs are divided evenly into blocks, columns of results into chunks. An item is
// one chunk for one block; those of a block follow each other, so that a thread has few blocks to normalise.
struct Grid {
    int rows, columns, step, chunks, blocks;
    int items() const { return chunks * blocks; }
};
struct Cell {
    int block, row, rows, column, columns;
};

static inline Cell cell(const Grid& grid, int item) {
    int block = grid.blocks == 1 ? 0 : item / grid.chunks, column = (item - block * grid.chunks) * grid.step;
    int columns = std::min(grid.step, grid.columns - column);
    if (grid.blocks == 1) return {0, 0, grid.rows, column, columns};
    int row = int(int64_t(grid.rows) * block / grid.blocks);
    return {block, row, int(int64_t(grid.rows) * (block + 1) / grid.blocks) - row, column, columns};
}

// How large the items of products with weights of type W are.
template <class W>
struct Items {
    static constexpr int kMostChunkRows = 64;
    static constexpr size_t kChunkBytes = 64 << 10;
    // Inputs of so many rows stay in the second cache while weights pass; fewer rows would not be worth the weights.
    static constexpr size_t kBlockBytes = 128 << 10;
    static constexpr int kLeastBlockRows = 64;

    static int most_rows(int width) {
        return std::max(kLeastBlockRows, int(kBlockBytes / (pitch_of(width) * sizeof(typename Input<W>::type))));
    }
    static int chunk_rows(int width) {
        return std::clamp(int(kChunkBytes / (size_t(width) * sizeof(W))) / 4 * 4, 4, kMostChunkRows);
    }
    static Grid grid(int rows, int columns, int width, int step) {
        int most = most_rows(width);
        return {rows, columns, step, (columns + step - 1) / step, (rows + most - 1) / most};
    }
    static Grid grid(int rows, int columns, int width) { return grid(rows, columns, width, chunk_rows(width)); }
};

// Normalised rows of x, or those that are `picked`, as inputs of a product. Each thread makes its own copy: cheaper than
// one more phase.
template <class W>
static inline void normalise_rows(const float* x, const W* weight, const Shape& s, const Cell& at,
                                  const int32_t* picked, bool first, Scratch<W>& scratch) {
    if (first || scratch.block != at.block)
        for (int i = 0; i < at.rows; ++i) {
            size_t row = picked ? picked[at.row + i] : at.row + i;
            normalise(x + row * s.hidden, weight, s.hidden, s.eps, scratch.inputs.get() + i * pitch_of(s.hidden));
        }
    scratch.block = at.block;
}

// Some columns of silu(gate) * up, for the rows that begin at `inputs`; the results of those rows begin at `gated`.
template <class W, class A>
static inline void gate_up_product(const W* weights, int hidden, int ffn, const Cell& at, const A* inputs, A* gated,
                                   Scratch<W>& scratch) {
    int count = at.columns;
    float* out = scratch.out.get();
    for (int of_up = 0; of_up < 2; ++of_up)
        multiply(weights + (size_t(of_up) * ffn + at.column) * hidden, count, hidden, inputs, pitch_of(hidden), at.rows,
                 out + of_up * count, 2 * count, scratch.wide.get());
    for (int row = 0; row < at.rows; ++row, out += 2 * count)
        gate<W>(out, out + count, count, gated + row * pitch_of(ffn) + at.column);
}

}  // namespace baton
