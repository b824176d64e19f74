// The experts of a sparse layer: which ones a row uses, in which slots they lie, and how the work on them is divided.
// Knows nothing of weights or threads.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.hpp"

namespace baton {

// The `wanted` largest of `count` logits, largest first and of equal ones the first. `shares` are their parts of the
// softmax over all, divided by their own sum if they are `normalised`.
static inline void choose_experts(const float* logits, int count, int wanted, bool normalised, int32_t* experts,
                                  float* shares) {
    int chosen = 0;
    for (int expert = 0; expert < count; ++expert) {
        float logit = logits[expert];
        if (chosen == wanted && !(logit > shares[wanted - 1])) continue;
        int at = chosen < wanted ? chosen++ : wanted - 1;
        for (; at > 0 && logit > shares[at - 1]; --at) {
            shares[at] = shares[at - 1];
            experts[at] = experts[at - 1];
        }
        shares[at] = logit;
        experts[at] = expert;
    }
    float largest = shares[0], sum_chosen = 0;
    Floats lanes = {};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) lanes += exponential(load(logits + i) - largest);
    float total = sum(lanes);
    for (; i < count; ++i) total += exponential(logits[i] - largest);
    for (int at = 0; at < wanted; ++at) {
        shares[at] = exponential(shares[at] - largest) / total;
        sum_chosen += shares[at];
    }
    for (int at = 0; normalised && at < wanted; ++at) shares[at] /= sum_chosen;
}

// Where the copies of each logical expert of a layer lie: see `Dispatch` in models/sparse.py.
struct Dispatch {
    const int32_t *table = nullptr, *counts = nullptr;
    int width = 1;
    bool dynamic = false;

    Dispatch layer(int index, int experts) const {
        return {table + size_t(index) * experts * width, counts + size_t(index) * experts, width, dynamic};
    }
    int slot(int expert, int key) const {
        return width == 1 ? table[expert] : table[size_t(expert) * width + key % counts[expert]];
    }
};

// Some columns of the product of a slot's matrix with its rows: those at the places [first, first + rows). A task of
// the shared expert, which every row uses, has the slot kShared and is item `first` of its own grid.
struct ExpertTask {
    static constexpr int kShared = -1;
    int slot, first, rows, column, columns;
};

// How the columns of a slot's matrix and the rows of a slot are divided into tasks.
struct TaskSize {
    int columns, step, most_rows;
    int chunks() const { return (columns + step - 1) / step; }
};

// The work of one phase: the tasks of a group of threads follow each other, and end at `ends`.
struct ExpertTasks {
    std::vector<ExpertTask> tasks;
    std::vector<int> ends;
};

// The uses of experts by the rows of a step, sorted by slot, so that the rows of a slot have places side by side.
class ExpertPlan {
public:
    // Ranks have `size` slots each, and belong to `groups` of threads in turn.
    void shape(int slots, int size, int groups) {
        counts_.resize(slots);
        cursors_.resize(slots);
        size_ = size;
        groups_ = groups;
    }

    // Room for so many uses, so that sorting them allocates nothing.
    void reserve(size_t uses) {
        size_t most = std::min(uses, counts_.size());
        used_.reserve(most);
        runs_.reserve(most);
        ends_.reserve(groups_);
    }
    void reserve(ExpertTasks& phase, size_t uses, const TaskSize& size, int shared) const {
        size_t blocks = std::min(uses, counts_.size()) + uses / size.most_rows;
        phase.tasks.reserve(blocks * size.chunks() + shared);
        phase.ends.reserve(groups_);
    }

    // places[i] is where use i of `slots[i]` is sorted to; slots without uses are not visited.
    void sort(const int32_t* slots, int uses, int32_t* places) {
        used_.clear();
        for (int i = 0; i < uses; ++i)
            if (counts_[slots[i]]++ == 0) used_.push_back(slots[i]);
        runs_.clear();
        ends_.clear();
        int first = 0;
        for (int group = 0; group < groups_; ++group) {
            for (int slot : used_) {
                if (slot / size_ % groups_ != group) continue;
                runs_.push_back({slot, first, counts_[slot]});
                cursors_[slot] = first;
                first += counts_[slot];
            }
            ends_.push_back(int(runs_.size()));
        }
        for (int i = 0; i < uses; ++i) places[i] = cursors_[slots[i]]++;
        for (int slot : used_) counts_[slot] = 0;
    }

    // Divides the products of all used slots, and gives each group its part of the `shared` items.
    void divide(const TaskSize& size, int shared, ExpertTasks& phase) const {
        phase.tasks.clear();
        phase.ends.clear();
        size_t run = 0;
        for (int group = 0; group < groups_; ++group) {
            for (; run < size_t(ends_[group]); ++run) divide(runs_[run], size, phase.tasks);
            for (int item = group; item < shared; item += groups_)
                phase.tasks.push_back({ExpertTask::kShared, item, 0, 0, 0});
            phase.ends.push_back(int(phase.tasks.size()));
        }
    }

private:
    struct Run {
        int slot, first, rows;
    };

    static void divide(const Run& run, const TaskSize& size, std::vector<ExpertTask>& tasks) {
        int blocks = (run.rows + size.most_rows - 1) / size.most_rows;
        for (int block = 0; block < blocks; ++block) {
            int begin = int(int64_t(run.rows) * block / blocks), end = int(int64_t(run.rows) * (block + 1) / blocks);
            for (int column = 0; column < size.columns; column += size.step)
                tasks.push_back({run.slot, run.first + begin, end - begin, column,
                                 std::min(size.step, size.columns - column)});
        }
    }

    std::vector<int> counts_, cursors_, used_, ends_;
    std::vector<Run> runs_;
    int size_ = 1, groups_ = 1;
};

// x += the sum of rows of `out`, each times its share, in their order.
static inline void add_shares(float* x, const float* out, size_t pitch, const int32_t* places, const float* shares,
                              int count, int columns) {
    auto mixed = [&](int d, auto kind) {
        using V = decltype(kind);
        V sum = load_as<V>(out + places[0] * pitch + d) * shares[0];
        for (int i = 1; i < count; ++i) {
            V share = shares[i] - V{};
            sum = multiply_add(load_as<V>(out + places[i] * pitch + d), share, sum);
        }
        return load_as<V>(x + d) + sum;
    };
    put_all<float>(x, columns, mixed);
}

}  // namespace baton
