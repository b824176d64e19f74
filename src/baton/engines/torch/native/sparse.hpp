// Sparse layers: each row goes through the experts that the router chooses for it, and through the shared one. Results
// wait in memory until all experts of a row are done and are then added in one order, so a row's sums are the same bits
// in every batch and wherever its experts lie. Knows nothing of phases.
#pragma once

#include <atomic>

#include "experts.hpp"
#include "layers.hpp"

namespace baton {

template <class W>
class SparseLayers {
    using A = typename Input<W>::type;
    static constexpr int kMixRows = 16, kMixColumns = 512;

public:
    // The threads are in `groups`, over which ranks are divided.
    SparseLayers(const Shape& shape, int groups) : s_(shape) {
        if (shape.slots) plan_.shape(shape.slots, shape.slots / shape.ranks, groups);
    }

    void dispatch(const Dispatch& dispatch) { dispatch_ = dispatch; }

    // Where the experts and slots of all rows are written, for each sparse layer; null for nowhere.
    void record(int32_t* experts, int32_t* slots) {
        recorded_experts_ = experts;
        recorded_slots_ = slots;
    }

    // Memory for a step of so many rows, whose states are in `x`.
    void prepare(int rows, float* x) {
        if (!s_.slots) return;
        rows_ = rows;
        x_ = x;
        divide();
        reserve();
    }

    // The index of a row in its sequence.
    void place(int row, int position) const {
        if (s_.slots) positions_[row] = position;
    }

    int route_items() const { return router_.items(); }
    int mix_items() const { return mix_.items(); }
    const ExpertTasks& gate_up_tasks() const { return gate_up_tasks_; }
    const ExpertTasks& down_tasks() const { return down_tasks_; }

    // Some columns of the router's logits. Whichever thread finishes a block of rows chooses their experts, and whichever
    // finishes the last block sorts all rows by slot: then it returns true, and the tasks are known.
    bool route(const Layer<W>& layer, int item, bool first, Scratch<W>& scratch) {
        Cell at = cell(router_, item);
        size_t pitch = pitch_of(s_.hidden);
        normalise_rows<W>(x_, layer.post_norm, s_, at, nullptr, first, scratch);
        if (at.column == 0) std::copy_n(scratch.inputs.get(), at.rows * pitch, normed_.get() + at.row * pitch);
        multiply(layer.router + size_t(at.column) * s_.hidden, at.columns, s_.hidden, scratch.inputs.get(), pitch,
                 at.rows, logits_.get() + size_t(at.row) * s_.experts + at.column, s_.experts,
                 scratch.wide.get());
        if (chunks_done_[at.block].fetch_add(1) + 1 < router_.chunks) return false;
        chunks_done_[at.block].store(0);
        choose(layer, at);
        if (blocks_done_.fetch_add(1) + 1 < router_.blocks) return false;
        blocks_done_.store(0);
        sort(layer.sparse);
        return true;
    }

    void gate_up(const Layer<W>& layer, int item, bool first, Scratch<W>& scratch) const {
        const ExpertTask& task = gate_up_tasks_.tasks[item];
        size_t pitch = pitch_of(s_.hidden);
        if (first) scratch.block = -1;  // What `inputs` holds is of another phase.
        if (task.slot == ExpertTask::kShared) {
            Cell at = cell(shared_gate_up_, task.first);
            return gate_up_product<W, A>(layer.gate_up, s_.hidden, s_.shared_ffn, at, normed_.get() + at.row * pitch,
                                         shared_gated_.get() + at.row * pitch_of(s_.shared_ffn), scratch);
        }
        const W* weights = layer.expert_gate_up + size_t(task.slot) * 2 * s_.expert_ffn * s_.hidden;
        gate_up_product<W, A>(weights, s_.hidden, s_.expert_ffn, {0, 0, task.rows, task.column, task.columns},
                              inputs_of(task, scratch), gated_.get() + task.first * pitch_of(s_.expert_ffn),
                              scratch);
    }

    void down(const Layer<W>& layer, int item, Scratch<W>& scratch) const {
        const ExpertTask& task = down_tasks_.tasks[item];
        if (task.slot == ExpertTask::kShared) return shared_down(layer, cell(shared_down_, task.first), scratch);
        size_t pitch = pitch_of(s_.expert_ffn);
        const W* weights = layer.expert_down + (size_t(task.slot) * s_.hidden + task.column) * s_.expert_ffn;
        multiply(weights, task.columns, s_.expert_ffn, gated_.get() + task.first * pitch, pitch, task.rows,
                 out_.get() + size_t(task.first) * s_.hidden + task.column, s_.hidden, scratch.wide.get());
    }

    // Adds what the experts of some rows came to.
    void mix(int item) const {
        Cell at = cell(mix_, item);
        int wanted = s_.experts_per_token;
        for (int row = at.row; row < at.row + at.rows; ++row)
            add_shares(x_ + size_t(row) * s_.hidden + at.column, out_.get() + at.column, s_.hidden,
                       places_.get() + size_t(row) * wanted, shares_.get() + size_t(row) * wanted, wanted, at.columns);
    }

private:
    void divide() {
        router_ = Items<W>::grid(rows_, s_.experts, s_.hidden);
        mix_ = {rows_, s_.hidden, kMixColumns, (s_.hidden + kMixColumns - 1) / kMixColumns,
                (rows_ + kMixRows - 1) / kMixRows};
        if (s_.shared_ffn) {
            shared_gate_up_ = Items<W>::grid(rows_, s_.shared_ffn, s_.hidden);
            shared_down_ = Items<W>::grid(rows_, s_.hidden, s_.shared_ffn);
        }
        gate_up_size_ = {s_.expert_ffn, Items<W>::chunk_rows(s_.hidden), Items<W>::most_rows(s_.hidden)};
        down_size_ = {s_.hidden, Items<W>::chunk_rows(s_.expert_ffn), Items<W>::most_rows(s_.expert_ffn)};
    }

    void reserve() {
        size_t rows = rows_, uses = rows * s_.experts_per_token;
        logits_.reserve(rows * s_.experts);
        normed_.reserve(rows * pitch_of(s_.hidden));
        for (Buffer<int32_t>* buffer : {&chosen_, &slots_, &places_, &sources_}) buffer->reserve(uses);
        shares_.reserve(uses);
        positions_.reserve(rows);
        seen_.reserve(s_.experts);
        gated_.reserve(uses * pitch_of(s_.expert_ffn));
        out_.reserve(uses * s_.hidden);
        if (s_.shared_ffn) {
            shared_gates_.reserve(rows);
            shared_gated_.reserve(rows * pitch_of(s_.shared_ffn));
        }
        plan_.reserve(uses);
        plan_.reserve(gate_up_tasks_, uses, gate_up_size_, shared_gate_up_.items());
        plan_.reserve(down_tasks_, uses, down_size_, shared_down_.items());
        if (chunks_done_size_ < size_t(router_.blocks)) {
            chunks_done_size_ = 0;
            chunks_done_.reset(new std::atomic<int>[router_.blocks]());
            chunks_done_size_ = router_.blocks;
        }
    }

    // The experts of a block of rows, and how much of the shared one they get.
    void choose(const Layer<W>& layer, const Cell& at) const {
        size_t pitch = pitch_of(s_.hidden), wanted = s_.experts_per_token;
        for (size_t row = at.row; row < size_t(at.row + at.rows); ++row)
            choose_experts(logits_.get() + row * s_.experts, s_.experts, int(wanted), s_.normalised,
                           chosen_.get() + row * wanted, shares_.get() + row * wanted);
        if (!layer.shared_gate) return;
        float* gates = shared_gates_.get() + at.row;
        multiply(layer.shared_gate, 1, s_.hidden, normed_.get() + at.row * pitch, pitch, at.rows, gates, 1,
                 nullptr);  // A single row of weights is not widened.
        for (int i = 0; i < at.rows; ++i) gates[i] = 1.0f / (1.0f + exponential(-gates[i]));
    }

    // Finds the slot of each use of an expert, and the work that they come to.
    void sort(int layer) {
        int wanted = s_.experts_per_token, uses = rows_ * wanted;
        Dispatch dispatch = dispatch_.layer(layer, s_.experts);
        if (dispatch.dynamic) std::fill_n(seen_.get(), s_.experts, 0);
        for (int use = 0; use < uses; ++use) {
            int expert = chosen_[use];
            slots_[use] = dispatch.slot(expert, dispatch.dynamic ? seen_[expert]++ : positions_[use / wanted]);
        }
        plan_.sort(slots_.get(), uses, places_.get());
        for (int use = 0; use < uses; ++use) sources_[places_[use]] = use / wanted;
        plan_.divide(gate_up_size_, shared_gate_up_.items(), gate_up_tasks_);
        plan_.divide(down_size_, shared_down_.items(), down_tasks_);
        if (!recorded_experts_) return;
        std::copy_n(chosen_.get(), uses, recorded_experts_ + size_t(layer) * uses);
        std::copy_n(slots_.get(), uses, recorded_slots_ + size_t(layer) * uses);
    }

    // The inputs of a task's rows, side by side; a thread that has the next columns of the same rows finds them there.
    const A* inputs_of(const ExpertTask& task, Scratch<W>& scratch) const {
        size_t pitch = pitch_of(s_.hidden);
        const int32_t* sources = sources_.get() + task.first;
        if (task.rows == 1) return normed_.get() + sources[0] * pitch;
        if (scratch.block != task.first)
            for (int i = 0; i < task.rows; ++i)
                std::copy_n(normed_.get() + sources[i] * pitch, s_.hidden, scratch.inputs.get() + i * pitch);
        scratch.block = task.first;
        return scratch.inputs.get();
    }

    // Some columns of x += gate * shared expert.
    void shared_down(const Layer<W>& layer, const Cell& at, Scratch<W>& scratch) const {
        size_t pitch = pitch_of(s_.shared_ffn);
        float* out = scratch.out.get();
        multiply(layer.down + size_t(at.column) * s_.shared_ffn, at.columns, s_.shared_ffn,
                 shared_gated_.get() + at.row * pitch, pitch, at.rows, out, at.columns, scratch.wide.get());
        for (int row = at.row; row < at.row + at.rows; ++row, out += at.columns) {
            float *x = x_ + size_t(row) * s_.hidden + at.column, gate = shared_gates_[row];
            for (int i = 0; i < at.columns; ++i) x[i] += gate * out[i];
        }
    }

    const Shape s_;
    int rows_ = 0;
    float* x_ = nullptr;
    Dispatch dispatch_;
    int32_t *recorded_experts_ = nullptr, *recorded_slots_ = nullptr;
    Grid router_{}, shared_gate_up_{}, shared_down_{}, mix_{};
    TaskSize gate_up_size_{}, down_size_{};
    ExpertPlan plan_;
    ExpertTasks gate_up_tasks_, down_tasks_;
    Buffer<int32_t> positions_, chosen_, slots_, places_, sources_, seen_;
    Buffer<float> logits_, shares_, shared_gates_, out_;
    Buffer<A> normed_, gated_, shared_gated_;
    std::unique_ptr<std::atomic<int>[]> chunks_done_;
    size_t chunks_done_size_ = 0;
    std::atomic<int> blocks_done_{0};
};

}  // namespace baton
