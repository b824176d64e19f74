// One decode step of a model of the Llama family, from tokens to logits: any number of rows, each one token of a
// sequence at its own position, over a paged KV cache. Weights are used where they lie, rows as the model's files have
// them. The interface is plain C; decoder.py is its only caller and checks shapes and types.
#include <algorithm>
#include <memory>

#include "kernels.hpp"
#include "pool.hpp"

namespace baton {

struct Shape {
    int32_t layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, blocks, block_size, is_bf16;
    float eps;
};

enum Status { kOk, kBadToken, kBadPosition, kBadBlock, kNoMemory };

struct Rows {
    int count, table_width;
    const int32_t *tokens, *positions, *tables;
    float* logits;
};

class Decoder {
public:
    virtual ~Decoder() = default;
    virtual void bind(const void* const* weights, void* kv, const float* cos, const float* sin) = 0;
    virtual Status forward(const Rows& rows) = 0;
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

private:
    struct Free {
        void operator()(T* data) const { operator delete[](data, std::align_val_t(64)); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

// Rows of a power of two bytes would all fall into the same few lines of the cache.
static size_t pitch_of(int width) { return (size_t(width) + 31) / 32 * 32 + 32; }

template <class W>
class Model final : public Decoder {
    using A = typename Input<W>::type;

    struct Layer {
        const W *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *down;
    };
    // Long contexts are attended to in spans of fixed length, so that one row can keep several threads busy; how a row
    // is divided depends on its own length alone.
    struct Span {
        int row, begin, count, of;
    };
    struct Scratch {
        Buffer<A> inputs;
        Buffer<float> out, scores, mixed;
        Buffer<const W*> keys, values;
    };
    enum Phase { kQkv, kAttention, kO, kGateUp, kDown, kPhases };
    static constexpr int kSpan = 128;
    static constexpr int kMostChunkRows = 64;
    static constexpr size_t kChunkBytes = 64 << 10;

public:
    Model(const Shape& shape, int threads)
        : s_(shape),
          group_(shape.heads / shape.kv_heads),
          q_size_(shape.heads * shape.head_dim),
          layers_(shape.layers),
          scratch_(threads),
          pool_(threads, shape.layers * kPhases + 1, &Model::call, this) {}

    void bind(const void* const* weights, void* kv, const float* cos, const float* sin) override {
        auto take = [&] { return static_cast<const W*>(*weights++); };
        embed_ = take();
        norm_ = take();
        head_ = take();
        for (Layer& layer : layers_)
            for (const W** field : {&layer.input_norm, &layer.qkv, &layer.qkv_bias, &layer.q_norm, &layer.k_norm,
                                    &layer.o, &layer.o_bias, &layer.post_norm, &layer.gate_up, &layer.down})
                *field = take();
        kv_ = static_cast<W*>(kv);
        cos_ = cos;
        sin_ = sin;
    }

    Status forward(const Rows& rows) override {
        rows_ = rows;
        Status status = check();
        if (status != kOk) return status;
        prepare();
        for (int row = 0; row < rows.count; ++row) {
            const W* from = embed_ + size_t(rows.tokens[row]) * s_.hidden;
            float* x = x_.get() + size_t(row) * s_.hidden;
            for (int i = 0; i < s_.hidden; ++i) x[i] = widen(from[i]);
        }
        int o_chunks = chunks(s_.hidden, q_size_), down_chunks = chunks(s_.hidden, s_.ffn);
        for (int layer = 0; layer < s_.layers; ++layer) {
            int phase = layer * kPhases;
            pool_.plan(phase + kQkv, s_.heads + 2 * s_.kv_heads);
            pool_.plan(phase + kAttention, int(spans_.size()) * s_.kv_heads);
            pool_.plan(phase + kO, o_chunks);
            pool_.plan(phase + kGateUp, chunks(s_.ffn, s_.hidden));
            pool_.plan(phase + kDown, down_chunks);
        }
        pool_.plan(s_.layers * kPhases, chunks(s_.vocab, s_.hidden));
        pool_.run();
        return kOk;
    }

private:
    Status check() const {
        for (int row = 0; row < rows_.count; ++row) {
            if (uint32_t(rows_.tokens[row]) >= uint32_t(s_.vocab)) return kBadToken;
            if (uint32_t(rows_.positions[row]) >= uint32_t(s_.context)) return kBadPosition;
            int used = rows_.positions[row] / s_.block_size + 1;
            if (used > rows_.table_width) return kBadPosition;
            const int32_t* table = rows_.tables + size_t(row) * rows_.table_width;
            for (int i = 0; i < used; ++i)
                if (uint32_t(table[i]) >= uint32_t(s_.blocks)) return kBadBlock;
        }
        return kOk;
    }

    void prepare() {
        size_t rows = rows_.count, group = group_;
        spans_.clear();
        first_span_.clear();
        for (int row = 0; row < rows_.count; ++row) {
            int length = rows_.positions[row] + 1, of = (length + kSpan - 1) / kSpan;
            first_span_.push_back(int(spans_.size()));
            for (int i = 0; i < of; ++i)
                spans_.push_back({row, i * kSpan, std::min(kSpan, length - i * kSpan), of});
        }
        x_.reserve(rows * s_.hidden);
        q_.reserve(rows * pitch_of(q_size_));
        attended_.reserve(rows * pitch_of(q_size_));
        gated_.reserve(rows * pitch_of(s_.ffn));
        partial_.reserve(spans_.size() * s_.kv_heads * partial_size());
        if (pending_size_ < rows * s_.kv_heads) {
            pending_.reset(new std::atomic<int>[rows * s_.kv_heads]());
            pending_size_ = rows * s_.kv_heads;
        }
        size_t widest = std::max<size_t>(s_.head_dim, 2 * kMostChunkRows);
        for (Scratch& scratch : scratch_) {
            scratch.inputs.reserve(rows * pitch_of(s_.hidden));
            scratch.out.reserve(rows * widest);
            scratch.scores.reserve(group * kSpan);
            scratch.mixed.reserve(group * s_.head_dim);
            scratch.keys.reserve(kSpan);
            scratch.values.reserve(kSpan);
        }
    }

    size_t partial_size() const { return size_t(group_) * (s_.head_dim + 2); }

    static int chunk_rows(int width) {
        return std::clamp(int(kChunkBytes / (size_t(width) * sizeof(W))) / 4 * 4, 4, kMostChunkRows);
    }
    static int chunks(int count, int width) { return (count + chunk_rows(width) - 1) / chunk_rows(width); }

    static void call(void* self, int phase, int item, int thread, bool first) {
        static_cast<Model*>(self)->work(phase, item, thread, first);
    }

    void work(int phase, int item, int thread, bool first) {
        Scratch& scratch = scratch_[thread];
        if (phase == s_.layers * kPhases) {
            if (first) normalise_rows(norm_, scratch);
            return head_chunk(item, scratch);
        }
        int index = phase / kPhases;
        const Layer& layer = layers_[index];
        switch (phase % kPhases) {
            case kQkv:
                if (first) normalise_rows(layer.input_norm, scratch);
                return qkv_head(layer, index, item, scratch);
            case kAttention:
                return attend(index, spans_[item / s_.kv_heads], item, scratch);
            case kO:
                return residual_chunk(layer.o, layer.o_bias, attended_.get(), q_size_, item, scratch);
            case kGateUp:
                if (first) normalise_rows(layer.post_norm, scratch);
                return gate_up_chunk(layer, item, scratch);
            case kDown:
                return residual_chunk(layer.down, nullptr, gated_.get(), s_.ffn, item, scratch);
        }
    }

    // Each thread makes its own copy: cheaper than one more phase.
    void normalise_rows(const W* weight, Scratch& scratch) const {
        for (int row = 0; row < rows_.count; ++row)
            normalise(x_.get() + size_t(row) * s_.hidden, weight, s_.hidden, s_.eps,
                      scratch.inputs.get() + row * pitch_of(s_.hidden));
    }

    W* cached(int layer, int of_value, int row, int position, int head) const {
        size_t block = rows_.tables[size_t(row) * rows_.table_width + position / s_.block_size];
        size_t slot = (size_t(layer) * 2 + of_value) * s_.blocks * s_.block_size + block * s_.block_size +
                      position % s_.block_size;
        return kv_ + (slot * s_.kv_heads + head) * s_.head_dim;
    }

    // One head of the query, the key or the value, of all rows: normalised, turned, and put where attention finds it.
    void qkv_head(const Layer& layer, int index, int head, Scratch& scratch) const {
        int size = s_.head_dim, half = size / 2;
        float* out = scratch.out.get();
        multiply(layer.qkv + size_t(head) * size * s_.hidden, size, s_.hidden, scratch.inputs.get(),
                 pitch_of(s_.hidden), rows_.count, out, size);
        bool query = head < s_.heads, value = head >= s_.heads + s_.kv_heads;
        const W* norm = query ? layer.q_norm : value ? nullptr : layer.k_norm;
        for (int row = 0; row < rows_.count; ++row, out += size) {
            int position = rows_.positions[row];
            if (layer.qkv_bias)
                for (int i = 0; i < size; ++i) out[i] += widen(layer.qkv_bias[head * size + i]);
            if (norm) normalise_head(out, norm);
            if (!value) rotate(out, cos_ + size_t(position) * half, sin_ + size_t(position) * half, half);
            if (query) {
                A* to = q_.get() + row * pitch_of(q_size_) + head * size;
                for (int i = 0; i < size; ++i) Round<W>::store(to + i, out[i]);
            } else {
                W* to = cached(index, value, row, position, head - s_.heads - (value ? s_.kv_heads : 0));
                for (int i = 0; i < size; ++i) Round<W>::store(to + i, out[i]);
            }
        }
    }

    void normalise_head(float* head, const W* weight) const {
        float squares = 0;
        for (int i = 0; i < s_.head_dim; ++i) squares += head[i] * head[i];
        float scale = 1.0f / __builtin_sqrtf(squares / s_.head_dim + s_.eps);
        for (int i = 0; i < s_.head_dim; ++i) head[i] *= scale * widen(weight[i]);
    }

    // The query heads that share one key head, over one span of one row.
    void attend(int layer, const Span& span, int item, Scratch& scratch) {
        int size = s_.head_dim, head = item % s_.kv_heads;
        const W **keys = scratch.keys.get(), **values = scratch.values.get();
        size_t to_value = size_t(s_.blocks) * s_.block_size * s_.kv_heads * size;
        for (int i = 0; i < span.count; ++i) {
            keys[i] = cached(layer, 0, span.row, span.begin + i, head);
            values[i] = keys[i] + to_value;
        }
        for (int i = span.count; i % 4; ++i) keys[i] = keys[i - 1];
        const A* query = q_.get() + span.row * pitch_of(q_size_) + head * group_ * size;
        float* scores = scratch.scores.get();
        for (int i = 0; i < span.count; i += 4) tiles<W>(keys + i, size, query, size, group_, scores + i, kSpan, nullptr);
        bool whole = span.of == 1;
        float* partial = partial_.get() + size_t(item) * partial_size();
        float* mixed = whole ? scratch.mixed.get() : partial;
        float *largest = partial + group_ * size, *totals = largest + group_;
        for (int g = 0; g < group_; ++g)
            totals[g] = soften(scores + g * kSpan, span.count, 1.0f / __builtin_sqrtf(size), largest[g]);
        mix(values, size, span.count, scores, kSpan, group_, mixed, size);
        if (whole) {
            for (int g = 0; g < group_; ++g) put_attended(span.row, head * group_ + g, mixed + g * size, totals[g]);
        } else if (pending_[span.row * s_.kv_heads + head].fetch_add(1) + 1 == span.of) {
            pending_[span.row * s_.kv_heads + head].store(0);
            join_spans(span, head, scratch.mixed.get());
        }
    }

    // Done by whichever thread finishes a row's last span, always in the order of the spans.
    void join_spans(const Span& span, int head, float* mixed) {
        int size = s_.head_dim;
        for (int g = 0; g < group_; ++g) {
            auto part = [&](int i) {
                return partial_.get() + (size_t(first_span_[span.row] + i) * s_.kv_heads + head) * partial_size();
            };
            int at = group_ * size + g;
            float most = part(0)[at], total = 0;
            for (int i = 1; i < span.of; ++i) most = std::max(most, part(i)[at]);
            std::fill(mixed, mixed + size, 0.0f);
            for (int i = 0; i < span.of; ++i) {
                float weight = exponential(part(i)[at] - most);
                total += weight * part(i)[at + group_];
                const float* from = part(i) + g * size;
                for (int d = 0; d < size; ++d) mixed[d] += weight * from[d];
            }
            put_attended(span.row, head * group_ + g, mixed, total);
        }
    }

    void put_attended(int row, int head, const float* mixed, float total) const {
        A* to = attended_.get() + row * pitch_of(q_size_) + head * s_.head_dim;
        for (int d = 0; d < s_.head_dim; ++d) Round<W>::store(to + d, mixed[d] / total);
    }

    // Some columns of x += inputs . weights + bias.
    void residual_chunk(const W* weights, const W* bias, const A* inputs, int width, int item, Scratch& scratch) const {
        int step = chunk_rows(width), begin = item * step, count = std::min(step, s_.hidden - begin);
        float* out = scratch.out.get();
        multiply(weights + size_t(begin) * width, count, width, inputs, pitch_of(width), rows_.count, out, count);
        for (int row = 0; row < rows_.count; ++row, out += count) {
            float* x = x_.get() + size_t(row) * s_.hidden + begin;
            for (int i = 0; i < count; ++i) x[i] += bias ? out[i] + widen(bias[begin + i]) : out[i];
        }
    }

    void gate_up_chunk(const Layer& layer, int item, Scratch& scratch) const {
        int step = chunk_rows(s_.hidden), begin = item * step, count = std::min(step, s_.ffn - begin);
        float* out = scratch.out.get();
        for (int of_up = 0; of_up < 2; ++of_up)
            multiply(layer.gate_up + (size_t(of_up) * s_.ffn + begin) * s_.hidden, count, s_.hidden,
                     scratch.inputs.get(), pitch_of(s_.hidden), rows_.count, out + of_up * count, 2 * count);
        for (int row = 0; row < rows_.count; ++row, out += 2 * count)
            gate<W>(out, out + count, count, gated_.get() + row * pitch_of(s_.ffn) + begin);
    }

    void head_chunk(int item, Scratch& scratch) const {
        int step = chunk_rows(s_.hidden), begin = item * step, count = std::min(step, s_.vocab - begin);
        multiply(head_ + size_t(begin) * s_.hidden, count, s_.hidden, scratch.inputs.get(), pitch_of(s_.hidden),
                 rows_.count, rows_.logits + begin, s_.vocab);
    }

    const Shape s_;
    const int group_, q_size_;
    const W *embed_ = nullptr, *norm_ = nullptr, *head_ = nullptr;
    std::vector<Layer> layers_;
    W* kv_ = nullptr;
    const float *cos_ = nullptr, *sin_ = nullptr;
    Rows rows_{};
    std::vector<Span> spans_;
    std::vector<int> first_span_;
    Buffer<float> x_, partial_;
    Buffer<A> q_, attended_, gated_;
    std::unique_ptr<std::atomic<int>[]> pending_;
    size_t pending_size_ = 0;
    std::vector<Scratch> scratch_;
    Pool pool_;  // Last: its threads end before what they use.
};

}  // namespace baton

#pragma GCC visibility push(default)
extern "C" {

void* baton_decoder_new(const baton::Shape* shape, int threads) {
    try {
        if (shape->is_bf16) return new baton::Model<baton::bf16>(*shape, threads);
        return new baton::Model<float>(*shape, threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

// `weights` is embed, norm, head, then ten for each layer in the order of the Layer tuple; null where there is none.
void baton_decoder_bind(void* decoder, const void* const* weights, void* kv, const float* cos, const float* sin) {
    static_cast<baton::Decoder*>(decoder)->bind(weights, kv, cos, sin);
}

// `tables` has `table_width` block numbers for each row. Writes `count` rows of logits.
int baton_decoder_forward(void* decoder, int count, const int32_t* tokens, const int32_t* positions,
                          const int32_t* tables, int table_width, float* logits) {
    try {
        return static_cast<baton::Decoder*>(decoder)->forward({count, table_width, tokens, positions, tables, logits});
    } catch (const std::bad_alloc&) {
        return baton::kNoMemory;
    }
}

void baton_decoder_free(void* decoder) { delete static_cast<baton::Decoder*>(decoder); }
}
#pragma GCC visibility pop
