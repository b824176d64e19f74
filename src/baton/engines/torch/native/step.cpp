// One step of a model of the Llama family, from tokens to logits: prompts, parts of prompts and single tokens of any
// number of sequences, over a paged KV cache. Weights are used where they lie, rows as the model's files have them.
// The interface is plain C; decoder.py is its only caller and checks shapes and types.
#include <algorithm>
#include <memory>

#include "attention.hpp"
#include "kernels.hpp"
#include "layers.hpp"
#include "pool.hpp"
#include "sparse.hpp"

namespace baton {

enum Status { kOk, kBadToken, kBadPosition, kBadBlock, kNoMemory, kBadRow };

// Consecutive tokens of one sequence: `count` rows of the step from `row` on, the first at index `start` of it. Their
// rotary positions are their indexes plus `shift`, or three for each row where `spatial` is not null. A row sees the
// tokens up to the end of its block of `block` tokens, as far as the piece has them.
struct Piece {
    int row, count, start, table_width, shift, block;
    const int32_t *table, *tokens, *spatial;
    // How many tokens of the sequence row `i` of the piece sees.
    int seen(int i) const { return std::min(start + count, ((start + i) / block + 1) * block); }
};

// Rows to compute logits for; the first `count` where `rows` is null.
struct Wanted {
    int count;
    const int32_t* rows;
    float* logits;
};

class Decoder {
public:
    virtual ~Decoder() = default;
    virtual void bind(const void* const* weights, void* kv, const float* cos, const float* sin) = 0;
    virtual void dispatch(const Dispatch& dispatch) = 0;
    virtual void record(int32_t* experts, int32_t* slots) = 0;
    virtual Status forward(int pieces, const int32_t* packed, const void* const* embedded, const Wanted& wanted) = 0;
    virtual Status score(const Wanted& wanted) = 0;
};

template <class W>
class Model final : public Decoder {
    using A = typename Input<W>::type;
    using Layer = baton::Layer<W>;
    using Scratch = baton::Scratch<W>;

    // What one thread attends to at once: some rows of a piece, over all spans of keys in turn; or one row of a long
    // context over one span of many, so that a single row can keep several threads busy. The sums are the same.
    struct Task {
        int piece, first, rows, part, parts, place;
    };
    // Cosines and sines of a row, for each pair of dimensions of a head.
    struct Angles {
        const float *cos = nullptr, *sin = nullptr;
    };
    // A dense layer neither routes nor mixes. How much a sparse layer does in between depends on the routes of its rows.
    enum Phase { kQkv, kAttention, kO, kRoute, kGateUp, kDown, kMix, kPhases };
    // Queries of one task, and the rows of a piece from which on they are not done one by one.
    static constexpr int kTaskQueries = 96, kManyRows = 4;

public:
    Model(const Shape& shape, int threads)
        : s_(shape),
          group_(shape.heads / shape.kv_heads),
          q_size_(shape.heads * shape.head_dim),
          groups_(std::min(threads, std::max(1, int(shape.ranks)))),
          layers_(shape.layers),
          sparse_(shape, groups_),
          scratch_(threads),
          pool_(threads, shape.layers * kPhases + 1, &Model::call, this) {}

    void bind(const void* const* weights, void* kv, const float* cos, const float* sin) override {
        auto take = [&] { return static_cast<const W*>(*weights++); };
        embed_ = take();
        norm_ = take();
        head_ = take();
        int sparse = 0;
        for (Layer& layer : layers_) {
            for (const W** field :
                 {&layer.input_norm, &layer.qkv, &layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.o, &layer.o_bias,
                  &layer.post_norm, &layer.gate_up, &layer.down, &layer.router, &layer.expert_gate_up,
                  &layer.expert_down, &layer.shared_gate})
                *field = take();
            layer.sparse = layer.router ? sparse++ : -1;
        }
        kv_ = static_cast<W*>(kv);
        cos_ = cos;
        sin_ = sin;
    }

    void dispatch(const Dispatch& dispatch) override { sparse_.dispatch(dispatch); }
    void record(int32_t* experts, int32_t* slots) override { sparse_.record(experts, slots); }

    // `packed` has, for each piece: count of tokens, index of the first, count of blocks, shift of the rotary positions,
    // 1 if each row has three of them instead, tokens that see each other, the blocks, the tokens, and those positions.
    // `embedded` has, for each row, what it begins with instead of the embedding of its token, or null; it may be null
    // itself.
    Status forward(int pieces, const int32_t* packed, const void* const* embedded, const Wanted& wanted) override {
        take_pieces(pieces, packed);
        embedded_ = embedded;
        Status status = check();
        if (status == kOk) status = take_wanted(wanted, rows_);
        if (status != kOk) return status;
        computed_ = 0;
        prepare();
        for (int phase = 0; phase < s_.layers * kPhases; phase += kPhases) {
            bool dense = layers_[phase / kPhases].sparse < 0;
            pool_.plan(phase + kQkv, qkv_.items());
            pool_.plan(phase + kAttention, int(tasks_.size()) * s_.kv_heads);
            pool_.plan(phase + kO, o_.items());
            pool_.plan(phase + kRoute, dense ? 0 : sparse_.route_items());
            pool_.plan(phase + kGateUp, dense ? gate_up_.items() : 0);
            pool_.plan(phase + kDown, dense ? down_.items() : 0);
            pool_.plan(phase + kMix, dense ? 0 : sparse_.mix_items());
        }
        plan_head();
        pool_.run();
        computed_ = rows_;
        return kOk;
    }

    // Logits of rows of the last forward().
    Status score(const Wanted& wanted) override {
        Status status = take_wanted(wanted, computed_);
        if (status != kOk) return status;
        reserve_rows(0);
        for (int phase = 0; phase < s_.layers * kPhases; ++phase) pool_.plan(phase, 0);
        plan_head();
        pool_.run();
        return kOk;
    }

private:
    void take_pieces(int count, const int32_t* packed) {
        pieces_.clear();
        rows_ = 0;
        for (int i = 0; i < count; ++i) {
            const int32_t *table = packed + 6, *tokens = table + packed[2], *end = tokens + packed[0];
            Piece piece{rows_,     packed[0], packed[1], packed[2], packed[3],
                        packed[5], table,     tokens,    packed[4] ? end : nullptr};
            pieces_.push_back(piece);
            rows_ += piece.count;
            packed = packed[4] ? end + 3 * piece.count : end;
        }
    }

    Status check() const {
        for (const Piece& piece : pieces_) {
            for (int i = 0; i < piece.count; ++i)
                if (uint32_t(piece.tokens[i]) >= uint32_t(s_.vocab)) return kBadToken;
            int64_t end = int64_t(piece.start) + piece.count;
            if (piece.start < 0 || piece.block < 1) return kBadPosition;
            if (end > s_.context || end > int64_t(piece.table_width) * s_.block_size) return kBadPosition;
            if (!check_rotary(piece)) return kBadPosition;
            for (int i = 0; i * s_.block_size < end; ++i)
                if (uint32_t(piece.table[i]) >= uint32_t(s_.blocks)) return kBadBlock;
        }
        return kOk;
    }

    bool check_rotary(const Piece& piece) const {
        int64_t first = int64_t(piece.start) + piece.shift;
        if (!piece.spatial) return first >= 0 && first + piece.count <= s_.context;
        for (int i = 0; i < 3 * piece.count; ++i)
            if (uint32_t(piece.spatial[i]) >= uint32_t(s_.context)) return false;
        return true;
    }

    Status take_wanted(const Wanted& wanted, int rows) {
        if (wanted.count > rows && !wanted.rows) return kBadRow;
        for (int i = 0; wanted.rows && i < wanted.count; ++i)
            if (uint32_t(wanted.rows[i]) >= uint32_t(rows)) return kBadRow;
        wanted_ = wanted;
        return kOk;
    }

    void prepare() {
        size_t rows = rows_;
        plan_attention();
        qkv_ = Items<W>::grid(rows_, q_size_ + 2 * s_.kv_heads * s_.head_dim, s_.hidden, s_.head_dim);
        o_ = Items<W>::grid(rows_, s_.hidden, q_size_);
        gate_up_ = Items<W>::grid(rows_, s_.ffn, s_.hidden);
        down_ = Items<W>::grid(rows_, s_.hidden, s_.ffn);
        x_.reserve(rows * s_.hidden);
        q_.reserve(rows * q_size_);
        attended_.reserve(rows * pitch_of(q_size_));
        gated_.reserve(rows * pitch_of(s_.ffn));
        sparse_.prepare(rows_, x_.get());
        angles_.reserve(rows);
        slots_.reserve(rows);
        size_t spatial = 0;
        for (const Piece& piece : pieces_)
            if (piece.spatial) spatial += piece.count;
        spatial_.reserve(spatial * s_.head_dim);
        size_t queries = std::max(kTaskQueries, group_), pitch = mixed_pitch();
        for (Scratch& scratch : scratch_) {
            scratch.packed.reserve(kSpan * pitch);
            scratch.turned.reserve(kSpan * pitch);
            scratch.mixed.reserve(queries * pitch);
            scratch.more.reserve(kQueries * pitch);
            scratch.sums.reserve(queries);
            scratch.keys.reserve(kSpan);
            scratch.values.reserve(kSpan);
        }
        reserve_rows(rows_);
        float* free = spatial_.get();
        for (const Piece& piece : pieces_)
            for (int i = 0; i < piece.count; ++i) {
                begin_row(piece, i);
                angles_.get()[piece.row + i] = piece.spatial ? mix_angles(piece.spatial + 3 * i, free) : plain(piece, i);
                if (piece.spatial) free += s_.head_dim;
            }
    }

    // Room for the rows that one item of a phase works on.
    void reserve_rows(int rows) {
        auto most = [&](int width) { return size_t(std::min(std::max(rows, wanted_.count), Items<W>::most_rows(width))); };
        size_t widest = std::max<size_t>(s_.head_dim, 2 * Items<W>::kMostChunkRows);
        int narrowest = std::min({s_.hidden, q_size_, s_.ffn, s_.shared_ffn ? s_.shared_ffn : s_.ffn});
        for (Scratch& scratch : scratch_) {
            scratch.inputs.reserve(most(s_.hidden) * pitch_of(s_.hidden));
            scratch.out.reserve(most(narrowest) * widest);
            scratch.wide.reserve(4 * wide_pitch(std::max({s_.hidden, q_size_, s_.ffn, s_.expert_ffn, s_.shared_ffn})));
        }
    }

    void begin_row(const Piece& piece, int i) {
        int row = piece.row + i, position = piece.start + i;
        const W* from = embed_ + size_t(piece.tokens[i]) * s_.hidden;
        if (embedded_ && embedded_[row]) from = static_cast<const W*>(embedded_[row]);
        float* x = x_.get() + size_t(row) * s_.hidden;
        for (int d = 0; d < s_.hidden; ++d) x[d] = widen(from[d]);
        sparse_.place(row, position);
        slots_.get()[row] = size_t(piece.table[position / s_.block_size]) * s_.block_size + position % s_.block_size;
    }

    Angles plain(const Piece& piece, int i) const {
        size_t position = piece.start + piece.shift + i;
        return {cos_ + position * (s_.head_dim / 2), sin_ + position * (s_.head_dim / 2)};
    }

    // The angles of a row with positions in time, height and width, written to `to`.
    Angles mix_angles(const int32_t* position, float* to) const {
        int half = s_.head_dim / 2, height = s_.time_pairs, width = height + s_.height_pairs;
        for (int d = 0; d < half; ++d) {
            size_t from = size_t(position[d < height ? 0 : d < width ? 1 : 2]) * half + d;
            to[d] = cos_[from];
            to[half + d] = sin_[from];
        }
        return {to, to + half};
    }

    void plan_attention() {
        tasks_.clear();
        int places = 0, most = std::max(1, kTaskQueries / group_);
        for (int number = 0; number < int(pieces_.size()); ++number) {
            const Piece& piece = pieces_[number];
            if (piece.count >= kManyRows) {
                // The last rows see the most keys: they go first, so that what is left at the end is little.
                for (int tiles = (piece.count + most - 1) / most, i = tiles - 1; i >= 0; --i) {
                    int first = int(int64_t(piece.count) * i / tiles), end = int(int64_t(piece.count) * (i + 1) / tiles);
                    tasks_.push_back({number, first, end - first, 0, 1, 0});
                }
                continue;
            }
            for (int row = 0; row < piece.count; ++row) {
                int parts = (piece.seen(row) - 1) / kSpan + 1;
                for (int part = 0; part < parts; ++part) tasks_.push_back({number, row, 1, part, parts, places++});
            }
        }
        partial_.reserve(size_t(places) * s_.kv_heads * group_ * mixed_pitch());
        partial_sums_.reserve(size_t(places) * s_.kv_heads * group_);
        if (pending_size_ < size_t(places) * s_.kv_heads) {
            pending_size_ = 0;
            pending_.reset(new std::atomic<int>[size_t(places) * s_.kv_heads]());
            pending_size_ = size_t(places) * s_.kv_heads;
        }
    }

    void plan_head() {
        head_of_ = Items<W>::grid(wanted_.count, s_.vocab, s_.hidden);
        pool_.plan(s_.layers * kPhases, head_of_.items());
    }

    int mixed_pitch() const { return whole_lanes(s_.head_dim); }

    static void call(void* self, int phase, int item, int thread, bool first) {
        static_cast<Model*>(self)->work(phase, item, thread, first);
    }

    void work(int phase, int item, int thread, bool first) {
        Scratch& scratch = scratch_[thread];
        if (phase == s_.layers * kPhases) return head_chunk(cell(head_of_, item), first, scratch);
        int index = phase / kPhases;
        const Layer& layer = layers_[index];
        switch (phase % kPhases) {
            case kQkv: return qkv_head(layer, index, item, first, scratch);
            case kAttention: return attend(index, tasks_[item / s_.kv_heads], item % s_.kv_heads, scratch);
            case kO: return residual_chunk(layer.o, layer.o_bias, attended_.get(), q_size_, cell(o_, item), scratch);
            case kRoute: return route(layer, index, item, first, scratch);
            case kGateUp:
                if (layer.sparse >= 0) return sparse_.gate_up(layer, item, first, scratch);
                return gate_up_chunk(layer, cell(gate_up_, item), first, scratch);
            case kDown:
                if (layer.sparse >= 0) return sparse_.down(layer, item, scratch);
                return residual_chunk(layer.down, nullptr, gated_.get(), s_.ffn, cell(down_, item), scratch);
            case kMix: return sparse_.mix(item);
        }
    }

    // When all rows have their experts, the next two phases of the layer can be planned.
    void route(const Layer& layer, int index, int item, bool first, Scratch& scratch) {
        if (!sparse_.route(layer, item, first, scratch)) return;
        pool_.replan(index * kPhases + kGateUp, sparse_.gate_up_tasks().ends.data(), groups_);
        pool_.replan(index * kPhases + kDown, sparse_.down_tasks().ends.data(), groups_);
    }

    // The keys of one layer and head; the values follow after as much as all keys of the layer take.
    W* cached(int layer, size_t slot, int head) const {
        return kv_ + ((size_t(layer) * 2 * s_.blocks * s_.block_size + slot) * s_.kv_heads + head) * s_.head_dim;
    }
    size_t to_value() const { return size_t(s_.blocks) * s_.block_size * s_.kv_heads * s_.head_dim; }

    // One head of the query, the key or the value, of a block of rows: normalised, turned, and put where attention
    // finds it.
    void qkv_head(const Layer& layer, int index, int item, bool first, Scratch& scratch) const {
        Cell at = cell(qkv_, item);
        int size = s_.head_dim, half = size / 2, head = item - at.block * qkv_.chunks;
        normalise_rows(x_.get(), layer.input_norm, s_, at, nullptr, first, scratch);
        float* out = scratch.out.get();
        multiply(layer.qkv + size_t(at.column) * s_.hidden, size, s_.hidden, scratch.inputs.get(), pitch_of(s_.hidden),
                 at.rows, out, size, scratch.wide.get());
        bool query = head < s_.heads, value = head >= s_.heads + s_.kv_heads;
        const W* norm = query ? layer.q_norm : value ? nullptr : layer.k_norm;
        for (int row = at.row; row < at.row + at.rows; ++row, out += size) {
            Angles angles = angles_.get()[row];
            if (layer.qkv_bias)
                for (int i = 0; i < size; ++i) out[i] += widen(layer.qkv_bias[head * size + i]);
            if (norm) normalise_head(out, norm);
            if (!value) rotate(out, angles.cos, angles.sin, half);
            auto turned = [&](int i, auto kind) { return load_as<decltype(kind)>(out + i); };
            if (query) {
                put_all<W>(queries(row, head / group_) + head % group_ * size, size, turned);
            } else {
                W* to = cached(index, slots_.get()[row], (head - s_.heads) % s_.kv_heads) + (value ? to_value() : 0);
                put_all<W>(to, size, turned);
            }
        }
    }

    void normalise_head(float* head, const W* weight) const {
        float squares = 0;
        for (int i = 0; i < s_.head_dim; ++i) squares += head[i] * head[i];
        float scale = 1.0f / __builtin_sqrtf(squares / s_.head_dim + s_.eps);
        for (int i = 0; i < s_.head_dim; ++i) head[i] *= scale * widen(weight[i]);
    }

    // The query heads of a row that share one key head. Those of the next row follow them.
    A* queries(int row, int kv_head) const {
        return q_.get() + (size_t(kv_head) * rows_ + row) * group_ * s_.head_dim;
    }

    // All query heads that share one key head, for the rows and spans of a task.
    void attend(int layer, const Task& task, int head, Scratch& scratch) {
        const Piece& piece = pieces_[task.piece];
        int row = piece.row + task.first, end = piece.seen(task.first + task.rows - 1);
        if (task.parts > 1) return attend_part(layer, task, head, scratch);
        float* mixed = scratch.mixed.get();
        Softmax* sums = scratch.sums.get();
        for (int begin = 0; begin < end; begin += kSpan) 
            attend_to(layer, task, head, begin, begin == 0, mixed, sums, scratch);
        for (int i = 0; i < task.rows * group_; ++i)
            put_attended(row + i / group_, head * group_ + i % group_, mixed + i * mixed_pitch(), sums[i].total);
    }

    // Adds the span of keys that starts at `begin` to what the queries of the task have already, or begins with it.
    void attend_to(int layer, const Task& task, int head, int begin, bool first, float* mixed, Softmax* sums,
                   Scratch& scratch) const {
        const Piece& piece = pieces_[task.piece];
        int end = std::min(piece.seen(task.first + task.rows - 1), begin + kSpan);
        const W **keys = scratch.keys.get(), **values = scratch.values.get();
        int count = gather(layer, piece, head, begin, end, keys, values);
        if (task.rows * group_ <= kQueries && s_.head_dim % kLanes == 0)
            return attend_with(SpanRows<W>{keys, values, count}, task, head, begin, first, mixed, sums, scratch);
        PackedSpan<W, A> span{keys, nullptr, scratch.packed.get(), mixed_pitch()};
        pack(values, count, s_.head_dim, scratch.packed.get());
        if (turn(keys, count, s_.head_dim, scratch.turned.get())) span.turned = scratch.turned.get();
        attend_with(span, task, head, begin, first, mixed, sums, scratch);
    }

    template <class Span>
    void attend_with(const Span& span, const Task& task, int head, int begin, bool first, float* mixed,
                     Softmax* sums, Scratch& scratch) const {
        const Piece& piece = pieces_[task.piece];
        int pitch = mixed_pitch(), skipped = begin / piece.block * piece.block - piece.start - task.first;
        const A* from = queries(piece.row + task.first, head);
        Softmax added[kQueries];
        // Rows of blocks before the span see nothing of it.
        for (int query = std::max(0, skipped) * group_, size; query < task.rows * group_; query += size) {
            size = std::min(kQueries, task.rows * group_ - query);
            auto seen = [&](int n) { return std::min(kSpan, piece.seen(task.first + (query + n) / group_) - begin); };
            float *to = mixed + query * pitch, *more = first ? to : scratch.more.get();
            attend_to_span(size, span, s_.head_dim, from + query * s_.head_dim, seen, more,
                           first ? sums + query : added);
            if (first) continue;
            for (int n = 0; n < size; ++n) join(to + n * pitch, sums[query + n], more + n * pitch, added[n], pitch);
        }
    }

    int gather(int layer, const Piece& piece, int head, int begin, int end, const W** keys, const W** values) const {
        size_t step = size_t(s_.kv_heads) * s_.head_dim;
        int count = 0;
        for (int position = begin; position < end;) {
            int block = position / s_.block_size, offset = position - block * s_.block_size;
            const W* key = cached(layer, size_t(piece.table[block]) * s_.block_size + offset, head);
            for (; offset < s_.block_size && position < end; ++offset, ++position, ++count, key += step) {
                keys[count] = key;
                values[count] = key + to_value();
            }
        }
        for (int i = count; i % kTurned; ++i) keys[i] = keys[i - 1];
        return count;
    }

    // One row and one of its spans. Whichever thread finishes the last of them joins them, always in their order.
    void attend_part(int layer, const Task& task, int head, Scratch& scratch) {
        int pitch = mixed_pitch(), row = pieces_[task.piece].row + task.first, first = task.place - task.part;
        auto place = [&](int part) { return (size_t(first + part) * s_.kv_heads + head) * group_; };
        auto mixed = [&](int part) { return partial_.get() + place(part) * pitch; };
        auto sums = [&](int part) { return partial_sums_.get() + place(part); };
        attend_to(layer, task, head, task.part * kSpan, true, mixed(task.part), sums(task.part), scratch);
        std::atomic<int>& pending = pending_[size_t(first) * s_.kv_heads + head];
        if (pending.fetch_add(1) + 1 < task.parts) return;
        pending.store(0);
        for (int g = 0; g < group_; ++g) {
            for (int part = 1; part < task.parts; ++part)
                join(mixed(0) + g * pitch, sums(0)[g], mixed(part) + g * pitch, sums(part)[g], pitch);
            put_attended(row, head * group_ + g, mixed(0) + g * pitch, sums(0)[g].total);
        }
    }

    void put_attended(int row, int head, const float* mixed, float total) const {
        A* to = attended_.get() + row * pitch_of(q_size_) + head * s_.head_dim;
        put_all<W>(to, s_.head_dim, [&](int d, auto kind) { return load_as<decltype(kind)>(mixed + d) / total; });
    }

    // Some columns of x += inputs . weights + bias.
    void residual_chunk(const W* weights, const W* bias, const A* inputs, int width, const Cell& at,
                        Scratch& scratch) const {
        float* out = scratch.out.get();
        multiply(weights + size_t(at.column) * width, at.columns, width, inputs + at.row * pitch_of(width),
                 pitch_of(width), at.rows, out, at.columns, scratch.wide.get());
        for (int row = at.row; row < at.row + at.rows; ++row, out += at.columns) {
            float* x = x_.get() + size_t(row) * s_.hidden + at.column;
            for (int i = 0; i < at.columns; ++i) x[i] += bias ? out[i] + widen(bias[at.column + i]) : out[i];
        }
    }

    void gate_up_chunk(const Layer& layer, const Cell& at, bool first, Scratch& scratch) const {
        normalise_rows(x_.get(), layer.post_norm, s_, at, nullptr, first, scratch);
        gate_up_product<W, A>(layer.gate_up, s_.hidden, s_.ffn, at, scratch.inputs.get(),
                              gated_.get() + at.row * pitch_of(s_.ffn), scratch);
    }

    void head_chunk(const Cell& at, bool first, Scratch& scratch) const {
        normalise_rows(x_.get(), norm_, s_, at, wanted_.rows, first, scratch);
        multiply(head_ + size_t(at.column) * s_.hidden, at.columns, s_.hidden, scratch.inputs.get(),
                 pitch_of(s_.hidden), at.rows, wanted_.logits + size_t(at.row) * s_.vocab + at.column, s_.vocab,
                 scratch.wide.get());
    }

    const Shape s_;
    const int group_, q_size_, groups_;
    const W *embed_ = nullptr, *norm_ = nullptr, *head_ = nullptr;
    std::vector<Layer> layers_;
    W* kv_ = nullptr;
    const float *cos_ = nullptr, *sin_ = nullptr;
    std::vector<Piece> pieces_;
    int rows_ = 0, computed_ = 0;
    Wanted wanted_{};
    Grid qkv_{}, o_{}, gate_up_{}, down_{}, head_of_{};
    std::vector<Task> tasks_;
    const void* const* embedded_ = nullptr;
    Buffer<Angles> angles_;
    Buffer<size_t> slots_;
    Buffer<float> x_, partial_, spatial_;
    Buffer<Softmax> partial_sums_;
    Buffer<A> q_, attended_, gated_;
    std::unique_ptr<std::atomic<int>[]> pending_;
    size_t pending_size_ = 0;
    SparseLayers<W> sparse_;
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

// `weights` is embed, norm, head, then for each layer ten in the order of the Layer tuple and four of its experts: router,
// gate_up, down and the gate of the shared one; null where there is none.
void baton_decoder_bind(void* decoder, const void* const* weights, void* kv, const float* cos, const float* sin) {
    static_cast<baton::Decoder*>(decoder)->bind(weights, kv, cos, sin);
}

// `table` and `counts` are read in every step, and may change between two.
void baton_decoder_dispatch(void* decoder, const int32_t* table, const int32_t* counts, int width, int dynamic) {
    static_cast<baton::Decoder*>(decoder)->dispatch({table, counts, width, dynamic != 0});
}

// Where each forward() writes the experts and the slots of its rows, for each sparse layer; null for nowhere.
void baton_decoder_record(void* decoder, int32_t* experts, int32_t* slots) {
    static_cast<baton::Decoder*>(decoder)->record(experts, slots);
}

// Writes a row of logits for each of the `wanted` rows, or the first `count` rows if it is null.
int baton_decoder_forward(void* decoder, int pieces, const int32_t* packed, const void* const* embedded, int count,
                          const int32_t* wanted, float* logits) {
    try {
        return static_cast<baton::Decoder*>(decoder)->forward(pieces, packed, embedded, {count, wanted, logits});
    } catch (const std::bad_alloc&) {
        return baton::kNoMemory;
    }
}

int baton_decoder_score(void* decoder, int count, const int32_t* wanted, float* logits) {
    try {
        return static_cast<baton::Decoder*>(decoder)->score({count, wanted, logits});
    } catch (const std::bad_alloc&) {
        return baton::kNoMemory;
    }
}

void baton_decoder_free(void* decoder) { delete static_cast<baton::Decoder*>(decoder); }
}
#pragma GCC visibility pop
